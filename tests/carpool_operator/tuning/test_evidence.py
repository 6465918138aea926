from __future__ import annotations

from math import inf, nan

import pytest
from fleets import RESNET, counted, pod_of, report_of
from msgspec.structs import replace

from carpool.batching.counters import Stats
from carpool.exchange.report import Stalls
from carpool.policy.parameters import Parameters
from carpool_operator.api.model import Reading
from carpool_operator.tuning.evidence import Evidence, add_up

CELLS = [(8, 10, 0.009)]


class Fleet:
    """Pods whose counters grow as a test says."""

    def __init__(self, pods=3):
        self.evidence = Evidence(str(RESNET))
        self.pods = [pod_of(index) for index in range(pods)]
        self.totals = {pod.uid: None for pod in self.pods}
        self.began = dict.fromkeys(self.totals, 0.0)
        self.now = 0.0

    def gather(self, arrivals=100, *, stale_after=30.0, seconds=2.0, edit=lambda index, report: report, **changes):
        """Let an interval pass; ``edit`` turns a report into another, or into None for no answer."""
        self.now += seconds
        readings = {}
        for index, pod in enumerate(self.pods):
            total = self.totals[pod.uid] = counted(arrivals, cells=CELLS, total=self.totals.get(pod.uid))
            report = report_of(
                Stats(self.now, models={"resnet": total}),
                uptime=self.now - self.began.setdefault(pod.uid, 0.0),
                **{"generation": 7, **changes},
            )
            report = edit(index, report)
            readings[pod.uid] = Reading(self.now, report, "" if report is not None else "timed out")
        self.evidence.turn(self.pods)
        return self.evidence.gather(self.now, self.pods, readings, stale_after)

    def quiet(self, seconds=2.0, stale_after=30.0):
        """Let time pass in which nothing is read."""
        self.now += seconds
        return self.evidence.gather(self.now, self.pods, {}, stale_after)


def only(index, edit):
    return lambda each, report: edit(report) if each == index else report


def uids(gathered):
    return {sample.uid for sample in gathered.samples}


def test_differences_are_summed_over_pods_per_replica():
    fleet = Fleet()
    assert fleet.gather().samples == [], "the first reading is what later ones are compared with"
    total = add_up(fleet.gather().samples)["resnet"]
    assert (total.pods, total.seconds, total.stats.arrivals, total.stats.hits) == (3, 6.0, 300, 300)
    assert {sample[:5] for sample in total.stats.samples()} >= {(0, 8, 1, 0, 30)}
    assert total.passing is False


def test_what_most_pods_run_is_in_force():
    def ran(in_flight):
        def edit(report):
            parameters = Parameters(max_in_flight=in_flight)
            return replace(report, lanes={n: replace(lane, parameters=parameters) for n, lane in report.lanes.items()})

        return edit

    fleet = Fleet()
    fleet.gather()
    assert add_up(fleet.gather(edit=only(1, ran(8))).samples)["resnet"].in_force.max_in_flight == 1
    two = Fleet(2)
    two.gather()
    # Of as many pods each, one runs more: first calls go on there until the others have as many.
    assert add_up(two.gather(edit=only(0, ran(8))).samples)["resnet"].in_force.max_in_flight == 8


def test_what_other_models_used_is_summed_over_pods():
    fleet = Fleet(2)
    fleet.gather()
    samples = fleet.gather().samples
    other = counted(50, cells=[(4, 10, 0.027)])
    shared = [each._replace(models={**each.models, "bert": other}, device_busy=0.3) for each in samples]
    sums = add_up(shared)
    assert sums["resnet"].others == pytest.approx((2 * 0.27, 2 * 0.3 * 3 / 4))
    assert sums["bert"].others == pytest.approx((2 * 0.09, 2 * 0.3 / 4))
    assert add_up(samples)["resnet"].others == (0, 0)


def test_the_mean_queue_is_rounded_up():
    fleet = Fleet(2)
    fleet.gather()
    busy = only(0, lambda report: replace(report, queue=replace(report.queue, rows=3)))
    assert add_up(fleet.gather(edit=busy).samples)["resnet"].queued_rows == 2
    assert add_up([]) == {}


def test_a_pod_that_does_not_know_a_model_counts_as_one_without_its_traffic():
    fleet = Fleet(2)
    fleet.gather()
    strange = only(0, lambda report: replace(report, stats=Stats(report.stats.at, models={}), lanes={}))
    gathered = fleet.gather(edit=strange)
    total = add_up(gathered.samples)["resnet"]
    assert (total.pods, total.seconds, total.stats.arrivals) == (2, 4.0, 100)


def test_a_restarted_pod_is_compared_with_itself_only():
    fleet = Fleet()
    fleet.gather()
    fleet.began["resnet-uid-1"], fleet.totals["resnet-uid-1"] = 2.5, None
    assert uids(fleet.gather()) == {"resnet-uid-0", "resnet-uid-2"}
    assert len(fleet.gather().samples) == 3


def test_a_restart_is_seen_even_when_it_lived_longer_than_its_forerunner():
    fleet = Fleet(1)
    fleet.gather()
    fleet.began["resnet-uid-0"] = 10.0
    assert fleet.gather(seconds=100.0).samples == []


def test_the_same_snapshot_twice_is_no_interval():
    fleet = Fleet(1)
    fleet.gather()
    first = fleet.gather()
    assert first.fresh
    stats = Stats(fleet.now, models={"resnet": fleet.totals["resnet-uid-0"]})
    again = Reading(fleet.now + 1, report_of(stats, uptime=fleet.now, generation=7))
    assert fleet.evidence.gather(fleet.now + 1, fleet.pods, {"resnet-uid-0": again}, 30.0).samples == []
    assert not fleet.evidence.gather(fleet.now + 1, fleet.pods, {"resnet-uid-0": again}, 30.0).fresh


def test_what_ran_two_configurations_in_one_interval_ran_none():
    fleet = Fleet(1)
    fleet.gather(generation=7)
    assert fleet.gather(generation=8).samples[0].generation == 0
    assert fleet.gather(generation=8).samples[0].generation == 8
    assert fleet.gather(generation=9, running=8).samples[0].generation == 8, "it went back by itself"


def spoilt(**changes):
    def edit(report):
        model = replace(report.stats.models["resnet"], **changes)
        return replace(report, stats=replace(report.stats, models={"resnet": model}))

    return edit


@pytest.mark.parametrize(
    "edit",
    [
        lambda report: replace(report, stats=replace(report.stats, at=nan)),
        lambda report: replace(report, uptime_seconds=inf),
        lambda report: replace(report, stalls=Stalls(0, nan)),
        lambda report: replace(report, queue=replace(report.queue, rows=-1)),
        lambda report: replace(report, target="other/Deployment/resnet"),
        spoilt(arrivals=-5),
        spoilt(batchable=-5),
        spoilt(batchable=10**5),
        spoilt(misses={"late": -1}),
        spoilt(cells=[(0, 8, 1, 0, 3, nan, 1.0)]),
        spoilt(cells=[(0, 8, 1, 0, 3, -1.0, 1.0)]),
        spoilt(cells=[(0, 8, 1, 0, 300, 1e9, 1e18)]),
        spoilt(cells=[(0, 8, 1, 0, 400, 40.0, 1e-9)]),
        spoilt(arrivals=10**12),
        spoilt(windows=10**6),
        spoilt(gaps_squared=nan),
        spoilt(gaps_squared=1e9),
        spoilt(durations=[0, 1]),
        spoilt(request_rows=[1, 2]),
        spoilt(request_rows=[10**9] + [0] * 16),
        spoilt(request_rows=[-1] + [0] * 16),
    ],
)
def test_numbers_that_cannot_be_are_refused_with_a_reason(edit):
    fleet = Fleet()
    fleet.gather()
    gathered = fleet.gather(edit=only(1, edit))
    assert uids(gathered) == {"resnet-uid-0", "resnet-uid-2"}
    assert set(gathered.failing) == {"resnet-1"}
    assert gathered.failing["resnet-1"]
    assert gathered.readable
    fleet.gather()
    assert len(fleet.gather().samples) == 3, "and what is right again is right"


def test_silence_has_a_reason_too():
    fleet = Fleet()
    fleet.gather()
    gathered = fleet.gather(edit=only(1, lambda _: None))
    assert gathered.failing == {"resnet-1": "timed out"}
    after = fleet.gather()
    assert max(sample.seconds for sample in after.samples) == 4.0, "the next interval is the longer for it"


def test_half_of_the_pods_have_to_be_readable():
    fleet = Fleet(4)
    fleet.gather()
    assert fleet.gather(edit=lambda index, report: report if index > 1 else None).readable
    assert not fleet.gather(edit=lambda index, report: report if index > 2 else None).readable
    alone = Fleet(1)
    assert not alone.gather(edit=lambda *_: None).readable


def test_what_is_not_read_for_long_is_stale():
    fleet = Fleet()
    fleet.gather()
    assert fleet.quiet(29.0).failing == {}
    assert set(fleet.quiet(2.0).failing) == {"resnet-0", "resnet-1", "resnet-2"}


def test_a_host_that_paused_says_nothing_of_the_model():
    fleet = Fleet()
    fleet.gather()
    gathered = fleet.gather(edit=only(2, lambda report: replace(report, stalls=Stalls(1, 0.6))))
    assert [sample.stalled for sample in gathered.samples] == [False, False, True]


def test_a_model_that_became_another_brings_no_service_times():
    fleet = Fleet(2)
    fleet.gather()

    def another(report):
        return replace(report, lanes={"resnet": replace(report.lanes["resnet"], replaced=1)})

    gathered = fleet.gather(edit=only(0, another))
    assert gathered.replaced == [("resnet-uid-0", "resnet")]
    by_pod = {sample.uid: sample.models["resnet"] for sample in gathered.samples}
    assert by_pod["resnet-uid-0"].cells == []
    assert by_pod["resnet-uid-0"].arrivals == 100
    assert by_pod["resnet-uid-1"].cells


def test_pods_that_are_not_ready_or_are_leaving_need_not_answer():
    fleet = Fleet(2)
    fleet.pods = [pod_of(0, ready=False), pod_of(1, deleting=True)]
    fleet.gather()
    gathered = fleet.gather(edit=lambda *_: None)
    assert (gathered.expected, gathered.failing) == (0, {})
    assert fleet.gather().expected == 0


def test_a_rollout_is_followed_once_most_pods_are_new():
    fleet = Fleet(3)
    fleet.gather()
    fleet.pods[0] = pod_of(10, template_hash="two")
    assert not fleet.evidence.turn(fleet.pods)
    fleet.gather()
    assert uids(fleet.gather()) == {"resnet-uid-1", "resnet-uid-2"}, "what the new one counts is another model's"
    fleet.pods[1] = pod_of(11, template_hash="two")
    assert fleet.evidence.turn(fleet.pods)
    assert not fleet.evidence.turn(fleet.pods)
    assert uids(fleet.gather()) == {"resnet-uid-10"}
    assert not fleet.evidence.turn([]), "no pods, no news"


def test_two_halves_of_a_rollout_don_t_take_turns():
    fleet = Fleet(2)
    fleet.gather()
    fleet.pods[0] = pod_of(10, template_hash="two")
    assert not fleet.evidence.turn(fleet.pods)
    assert not fleet.evidence.turn(list(reversed(fleet.pods)))


def test_who_is_gone_is_forgotten():
    fleet = Fleet(3)
    fleet.gather()
    fleet.pods = fleet.pods[:1]
    fleet.gather()
    assert set(fleet.evidence.pods) == {"resnet-uid-0"}


def test_a_lane_that_was_forgotten_and_came_back_counts_from_then_on():
    fleet = Fleet(1)
    fleet.gather(500)
    fleet.totals["resnet-uid-0"] = counted()
    gathered = fleet.gather(20)
    assert gathered.samples[0].models["resnet"].arrivals == 20
