from __future__ import annotations

import pytest
from fleets import World, pod_of, spec
from msgspec.structs import replace
from things import as_kept, pod

from carpool_operator.cluster.objects import RawPod
from carpool_operator.tuning.cold_start import REMEMBERED, ColdStarts


def starting(index):
    return pod_of(index, ready=False)


def ready(index, seconds):
    return pod_of(index, ready_after=seconds)


def test_a_start_that_was_seen_counts_once_and_the_median_of_the_last_is_reported():
    starts = ColdStarts()
    starts.observe([])
    starts.observe([starting(0)])
    assert starts.seconds is None
    for _ in range(3):
        starts.observe([ready(0, 40.0)])
    assert starts.seconds == 40.0
    for index, seconds in enumerate([60.0, 300.0], 1):
        starts.observe([starting(index)])
        starts.observe([ready(index, seconds)])
    assert starts.seconds == 60.0
    for index in range(10, 10 + REMEMBERED):
        starts.observe([starting(index)])
        starts.observe([ready(index, 20.0)])
    assert starts.seconds == 20.0


def test_a_pod_that_was_ready_before_is_no_start():
    starts = ColdStarts()
    # This operator began when the pod had served for long; its probe fails once.
    for each in (ready(0, 86400.0), starting(0), ready(0, 90000.0)):
        starts.observe([each])
    assert starts.seconds is None


def test_a_pod_that_fails_its_probe_while_an_operator_restarts_is_no_start():
    starts = ColdStarts()
    starts.observe([starting(0), ready(1, 40.0)])
    starts.observe([ready(0, 2 * 86400.0 + 30), ready(1, 40.0), starting(2)])
    assert starts.seconds is None
    starts.observe([starting(0), starting(1), ready(2, 50.0)])
    starts.observe([ready(0, 2 * 86400.0 + 60), ready(1, 2 * 86400.0 + 60), ready(2, 50.0)])
    assert starts.seconds == 50.0


@pytest.mark.parametrize(("status", "wanted"), [("True", 42.0), ("False", 0.0)])
def test_it_is_read_from_the_pods_condition(status, wanted):
    raw = pod()
    raw["metadata"]["creationTimestamp"] = "2026-11-26T10:00:00Z"
    raw["status"]["conditions"] = [
        {"type": "Ready", "status": status, "lastTransitionTime": "2026-11-26T10:00:42Z"},
    ]
    kept = as_kept(RawPod, raw)
    assert (kept.ready, kept.ready_after) == (status == "True", wanted)


def test_the_status_says_it():
    world = World(spec(), pods=1)
    world.pods[0].spoil = lambda report: replace(
        report, lanes={name: replace(lane, capacity=100.0) for name, lane in report.lanes.items()}
    )
    served = world.pods[0].pod
    world.pods[0].pod = replace(served, uid="before")
    world.run(2, 20)
    world.pods[0].pod = replace(served, ready=False)
    world.run(2, 20)
    world.pods[0].pod = replace(world.pods[0].pod, ready=True, ready_after=42.0)
    world.run(6, 20)
    assert world.policy.status["capacity"][0]["coldStart"] == "42s"
