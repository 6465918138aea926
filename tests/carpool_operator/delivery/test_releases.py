from __future__ import annotations

import msgspec
from msgspec.structs import replace
from things import as_kept, pod

from carpool.batching.counters import Stats
from carpool.exchange.change import encode, read_change
from carpool.exchange.report import Lane, Queue, Report
from carpool.policy.parameters import Parameters
from carpool_operator.api.injection import STANDBY
from carpool_operator.api.model import Target
from carpool_operator.cluster.objects import RawPod
from carpool_operator.delivery.releases import AGAIN, Releases, is_standby, release

WEB = Target("ns", "Deployment", "web")


def pods(*bodies):
    return {WEB: [as_kept(RawPod, each) for each in bodies or (pod(),)]}


def report(generation=5, slo=3600.0, parameters=STANDBY):
    lane = Lane(parameters=parameters, pass_through=True, queued_requests=0, cap=1, quarantined=False)
    return Report(
        stats=Stats(at=1.0), uptime_seconds=1.0, ready=True, readiness="", generation=generation, slo_seconds=slo,
        queue=Queue(rows=0, in_flight=0, slots=1), lanes={"m": lane},
    )  # fmt: skip


def test_pods_are_due_once_their_target_has_had_no_policy_for_a_while():
    releases = Releases()
    assert not releases.due(0.0, pods(), {WEB}, set())
    assert not releases.due(2.0, pods(), set(), set())
    assert not releases.due(4.0, pods(), {WEB}, set())
    assert not releases.due(6.0, pods(), set(), set())
    assert not releases.due(15.0, pods(), set(), set())
    assert [each.name for each in releases.due(16.0, pods(), set(), set())] == ["web-1"]
    assert releases.is_without(WEB)


def test_released_pods_and_those_that_end_or_have_no_address_are_not_due():
    releases = Releases()
    deleting = pod("web-2")
    deleting["metadata"]["deletionTimestamp"] = "2026-11-21T12:00:00Z"
    there = pods(pod(), deleting, pod("web-3", ip=""))
    releases.due(0.0, there, set(), set(), [WEB])
    (due,) = releases.due(20.0, there, set(), set())
    releases.done(due.uid, 20.0)
    assert not releases.due(22.0, there, set(), set())
    releases.due(24.0, there, {WEB}, set())  # the policy is back, and goes again
    releases.due(26.0, there, set(), set())
    assert releases.due(40.0, there, set(), set()) == [due]


def test_a_released_pod_is_read_once_more():
    # Its container may have restarted while the document was still mounted.
    releases = Releases()
    releases.due(0.0, pods(), {WEB}, set())
    releases.due(2.0, pods(), set(), set())
    (due,) = releases.due(20.0, pods(), set(), set())
    releases.done(due.uid, 20.0)
    assert not releases.due(20.0 + AGAIN - 1, pods(), set(), set())
    assert releases.due(20.0 + AGAIN, pods(), set(), set()) == [due]
    releases.done(due.uid, 20.0 + AGAIN)
    assert not releases.due(1e6, pods(), set(), set())


def test_pods_with_sidecars_by_hand_that_never_had_a_policy_are_left_alone():
    # They may have a policy of their own.
    by_hand = {WEB: [replace(pods()[WEB][0], container="")]}
    injected = {WEB: [replace(pods()[WEB][0], container="server")]}
    for there, released in ((by_hand, False), (injected, True)):
        releases = Releases()
        releases.due(0.0, there, set(), set())
        assert bool(releases.due(100.0, there, set(), set())) == released
    releases.due(0.0, by_hand, {WEB}, set())
    releases.due(1.0, by_hand, set(), set())
    assert releases.due(100.0, by_hand, set(), set())


def test_targets_that_are_gone_are_forgotten():
    releases = Releases()
    for number in range(100):
        preview = Target("ci", "Deployment", f"pr-{number}")
        releases.due(float(number), {}, {WEB, preview}, ())
        releases.forget(lambda target: target not in {WEB, preview})  # noqa: B023 - called at once
        assert releases.had(preview)
    assert [target for target in (WEB, Target("ci", "Deployment", "pr-0")) if releases.had(target)] == [WEB]
    assert len(releases._had) == 2


def test_in_a_namespace_with_an_unreadable_policy_nothing_is_due():
    releases = Releases()
    releases.due(0.0, pods(), {WEB}, {"ns"})
    assert not releases.due(100.0, pods(), set(), {"ns"})
    assert not releases.is_without(WEB)


def test_a_sidecar_is_on_standby_without_a_document_or_after_a_release():
    assert is_standby(report(generation=1))
    assert is_standby(report())
    assert not is_standby(report(slo=0.05))
    assert not is_standby(report(parameters=Parameters()))


def test_the_last_document_is_newer_than_what_runs_and_names_no_policy():
    change = release(WEB, 9_000, 5.0, ())
    assert (change.generation, release(WEB, 9_000, 50.0, ()).generation) == (9_001, 50_000)
    assert read_change(msgspec.json.decode(encode(change))) == change
    assert change.policy is None
