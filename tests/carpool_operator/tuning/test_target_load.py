from __future__ import annotations

import pytest
from fleets import World, spec, workload_of
from msgspec.structs import replace

from carpool.batching.counters import ModelStats
from carpool.forecasting.capacity import replicas
from carpool.policy.spec import Objective
from carpool_operator.api.annotations import AUTOSCALED
from carpool_operator.tuning.evidence import Rates, Sample
from carpool_operator.tuning.target_load import LEAST, SELDOM, SPAN, WINDOW, TargetLoad
from carpool_operator.tuning.token_streams import StreamSample


def sample(uid, rate, *, seconds=5.0, capacity=100.0, lower=None, by_hand=None, busy=0.4, model="m"):
    known = {}
    if capacity is not None:
        known[model] = Rates(capacity, lower or capacity, 0.8 * capacity, 0.25 * capacity, by_hand)
    return Sample(
        uid=uid,
        generation=1,
        seconds=seconds,
        stalled=False,
        models={model: ModelStats(arrivals=round(rate * seconds))},
        passing={},
        queued_rows=0,
        device_busy=busy * seconds,
        capacities=known,
    )


class Fleet:
    def __init__(self):
        self.load, self.now = TargetLoad(), 0.0

    def pass_by(self, seconds, *rates, **changes):
        """Read pods 0, 1, ... for so long, each with its rate, every five seconds."""
        for _ in range(round(seconds / 5)):
            self.now += 5
            uids = [str(index) for index in range(len(rates))]
            samples = [sample(uid, rate, **changes) for uid, rate in zip(uids, rates, strict=True)]
            self.load.observe(self.now, samples, uids)
        return self.said()

    def said(self):
        return self.load.status(self.now, "Deployment/m", 0.2)


def test_loads_add_up_over_pods_in_capacities_of_one():
    said = Fleet().pass_by(20, 80, 40, lower=80.0)
    assert said.load == pytest.approx(1.2)
    assert said.load_upper == pytest.approx(1.5)
    assert (said.replicas, said.replicas_upper, said.serving) == (2, 2, 2)
    assert (said.replicas_zero_wait, said.replicas_unbatched) == (2, 6)
    assert (said.requests_per_second, said.utilization, said.lowest_utilization) == (100.0, 0.4, 0.2)


def test_a_cold_start_is_said_at_once_and_by_the_next_operator_too():
    fleet = Fleet()
    said = fleet.pass_by(20, 80)
    assert said.cold_start is None
    measured = fleet.load.status(fleet.now, "Deployment/m", 0.2, 41.6667)
    assert measured.cold_start == 41.7
    successor = Fleet()
    successor.load.recall(measured)
    assert successor.pass_by(20, 80).cold_start == 41.7


def test_what_the_baseline_needs_is_said_where_every_pod_knows_it():
    fleet = Fleet()
    assert fleet.pass_by(20, 80, 40, by_hand=50.0).replicas_by_hand == 3
    # Over the same five minutes as the others.
    assert fleet.pass_by(SPAN + 20, 8, 4, by_hand=50.0).replicas_by_hand == 3
    assert Fleet().pass_by(20, 80, 40).replicas_by_hand is None
    assert Fleet().pass_by(SPAN + 5, 0).replicas_by_hand is None, "no load, and no baseline either"
    load = TargetLoad()
    load.observe(5.0, [sample("0", 80, by_hand=50.0), sample("1", 40)], ["0", "1"])
    assert load.status(5.0, "Deployment/m", None).replicas_by_hand is None
    # The baseline is gone from the policy.
    assert fleet.pass_by(SPAN, 80, 40).replicas_by_hand is None


def test_replicas_are_planned_up_to_the_target_of_the_autoscaler_that_is_seen():
    # 2.1 capacities, 2.6 at the upper confidence: 3 replicas each at 0.9; at 0.7 3 and 4.
    counts = {}
    for full in (0.9, 0.7):
        load = TargetLoad()
        load.observe(20.0, [sample(uid, 105, seconds=20.0, lower=80.0) for uid in ("0", "1")], ["0", "1"], full)
        counts[full] = load.status(20.0, "Deployment/m", None)
    assert [(each.replicas, each.replicas_upper, each.target_load) for each in counts.values()] == [
        (3, 3, None),
        (3, 4, 0.7),
    ]
    assert [(each.replicas_zero_wait, each.replicas_unbatched) for each in counts.values()] == [(3, 10), (4, 12)]


def test_scale_out_is_said_at_once_and_scale_in_after_the_window():
    fleet = Fleet()
    assert fleet.pass_by(20, 50, 50).replicas == 2
    assert fleet.pass_by(SPAN + 5, 200, 200).replicas == 5
    # The load is gone. If this is a short pause of the load, scaling in now would mean scaling out again.
    assert fleet.pass_by(WINDOW - 20, 20, 20).replicas == 5
    assert fleet.pass_by(40, 20, 20).replicas == 1


def test_all_ways_are_of_the_same_window():
    # After a peak Carpool's number would be of the peak and that of zero wait of now: it would look better.
    fleet = Fleet()
    peak = fleet.pass_by(SPAN + 20, 200, 200)
    said = fleet.pass_by(WINDOW - 40, 20, 20)
    assert said.replicas == peak.replicas
    assert (said.replicas_zero_wait, said.replicas_unbatched) == (peak.replicas_zero_wait, peak.replicas_unbatched)


def test_a_load_that_swings_inside_the_window_does_not_flap():
    fleet = Fleet()
    fleet.pass_by(20, 160)
    counts = {fleet.pass_by(30, rate).replicas for rate in (160, 40, 160, 40, 160, 40)}
    assert counts == {2}


def test_a_pod_that_starts_is_no_capacity_and_its_load_is_counted_where_it_comes():
    fleet = Fleet()
    fleet.pass_by(20, 90, 90)
    fleet.load.observe(fleet.now + 5, [sample("0", 90), sample("1", 90), sample("2", 0, capacity=None)], ["0", "1"])
    assert fleet.load.now.serving == 2
    assert fleet.load.now.load == pytest.approx(1.8)
    # It serves, and has measured nothing of its own: it is as the others are.
    fleet.load.observe(fleet.now + 10, [sample("2", 60, capacity=None)], ["0", "1", "2"])
    assert fleet.load.now.serving == 3
    assert fleet.load.now.load == pytest.approx(1.8 + 0.6)


def test_pods_on_faster_devices_count_by_what_they_can_do():
    load = TargetLoad()
    load.observe(5.0, [sample("slow", 50, capacity=100.0), sample("fast", 50, capacity=200.0)], ["slow", "fast"])
    assert load.now.load == pytest.approx(0.75)


def test_without_any_capacity_nothing_is_said_and_what_was_said_stays():
    fleet = Fleet()
    assert fleet.pass_by(10, 50, capacity=None) is None
    assert fleet.pass_by(SPAN + 5, 0, capacity=None) is None
    assert Fleet().pass_by(SPAN + 5, 0).replicas == 0, "nothing comes, so nothing is needed"
    said = fleet.pass_by(20, 50)
    fleet.load.observe(fleet.now + 5, [], [])
    assert fleet.said() is said


def streaming(uid, rate, streams, *, capacity=10.0, seconds=5.0):
    """A model at a tenth of the rate that a pod carries, and token streams; ``None``: they were left out."""
    counted = None
    if streams is not None:
        counted = StreamSample(
            arrivals=round(streams * seconds), hits=0, missed=0, output_tokens=0, ttft=[], tpot=[], running=0,
            queued=0, gated=True, limit=None, capacity=capacity, capacity_tokens=None,
        )  # fmt: skip
    return sample(uid, rate, seconds=seconds)._replace(streams=counted, partial=streams is None)


def test_token_streams_that_are_left_out_do_not_take_away_the_replicas_they_need():
    load, now = TargetLoad(), 0.0
    for streams in [20.0] * 4 + [None] * 100:
        now += 5.0
        load.observe(now, [streaming("0", 10.0, streams)], ["0"])
        assert load.now.load == pytest.approx(2.1)
        assert load.status(now, "Deployment/m", None).replicas == 3
    # They are there again, and fewer.
    for _ in range(round((WINDOW + SPAN) / 5) + 1):
        now += 5.0
        load.observe(now, [streaming("0", 10.0, 5.0)], ["0"])
    assert load.now.load == pytest.approx(0.6)
    assert load.status(now, "Deployment/m", None).replicas == 1


def test_one_pod_without_its_token_streams_does_not_hide_what_the_others_need():
    load = TargetLoad()
    load.observe(5.0, [streaming("0", 10.0, 20.0), streaming("1", 10.0, 20.0)], ["0", "1"])
    load.observe(25.0, [streaming("0", 10.0, None), streaming("1", 10.0, 40.0, seconds=20.0)], ["0", "1"])
    assert load.now.load == pytest.approx(2.1 + 4.1)


def test_the_load_is_not_known_while_nothing_whole_was_read_of_a_pod():
    fleet = Fleet()
    said = fleet.pass_by(20, 200)
    fleet.load.observe(fleet.now + 5, [sample("0", 20), streaming("1", 10.0, None)], ["0", "1"])
    assert fleet.load.now is None
    assert fleet.said() is said


def test_a_status_is_written_for_what_is_clear_and_not_for_every_request():
    fleet = Fleet()
    said = fleet.pass_by(SELDOM, 50, capacity=10.0)
    assert fleet.pass_by(SELDOM, 51, capacity=10.0) is said, "2 % more"
    assert fleet.pass_by(LEAST + SPAN, 53.4, capacity=10.0).load == pytest.approx(5.34), "it rises"
    lower = fleet.pass_by(30, 49, capacity=10.0)
    assert lower.load == pytest.approx(5.34), "it may rise again"
    assert fleet.pass_by(SELDOM + SPAN, 49, capacity=10.0).load == pytest.approx(4.9)
    # A twentieth of a replica is nothing, however much it is of the load.
    small = Fleet()
    said = small.pass_by(SELDOM, 5)
    assert small.pass_by(2 * SELDOM, 10) is said


def test_another_operator_goes_on_from_what_was_said():
    fleet = Fleet()
    said = fleet.pass_by(20, 200, 200)
    successor = Fleet()
    successor.load.recall(said)
    assert successor.said() is said
    assert successor.pass_by(WINDOW - 30, 20, 20).replicas == 5
    assert successor.pass_by(60, 20, 20).replicas == 1


# -- the objective where an autoscaler follows


def applied(world):
    return world.controller.change(world.workload.target).policy.objective


@pytest.mark.parametrize(
    ("objective", "annotations", "wanted"),
    [
        (Objective.BALANCED, {AUTOSCALED: "true"}, Objective.EFFICIENCY),
        (Objective.BALANCED, {AUTOSCALED: "false"}, Objective.BALANCED),
        (Objective.BALANCED, {}, Objective.BALANCED),
        (Objective.LATENCY, {AUTOSCALED: "true"}, Objective.LATENCY),
    ],
)
def test_a_workload_with_the_annotation_workload_is_batched_as_far_as_the_slo_allows(objective, annotations, wanted):
    world = World(spec(objective=objective), pods=1)
    world.workload = workload_of(replicas=1, annotations=annotations)
    world.run(6, 20)
    assert applied(world) is wanted
    # The annotation is gone again: as the policy says.
    world.workload = workload_of(replicas=1)
    world.run(6, 20)
    assert applied(world) is objective


HPA = "HorizontalPodAutoscaler/resnet"


@pytest.mark.parametrize(("annotations", "wanted"), [({}, 0.7), ({AUTOSCALED: "false"}, None)])
def test_the_status_counts_replicas_by_the_target_of_the_autoscaler(annotations, wanted):
    world = World(spec(objective=Objective.BALANCED), pods=1)
    world.workload = replace(workload_of(replicas=1, annotations=annotations), autoscaler=HPA, full=0.7)
    world.pods[0].spoil = lambda report: replace(
        report, lanes={name: replace(lane, capacity=100.0) for name, lane in report.lanes.items()}
    )
    world.run(6, 20)
    assert [each.get("targetLoad") for each in world.policy.status["capacity"]] == [wanted]


@pytest.mark.parametrize(("by_hand", "worse"), [(50.0, 2.0), (150.0, 1.0), (None, None), (0.0, None)])
def test_the_status_says_what_the_baseline_needs_where_the_pods_report_it(by_hand, worse):
    world = World(spec(), pods=1)
    world.pods[0].spoil = lambda report: replace(
        report,
        lanes={name: replace(lane, capacity=100.0, capacity_by_hand=by_hand) for name, lane in report.lanes.items()},
    )
    world.run(6, 20)
    (said,) = world.policy.status["capacity"]
    # No setting carries more than the best one, whatever a report says.
    assert said.get("replicasByHand") == (None if worse is None else replicas(worse * said["load"]))


@pytest.mark.parametrize(
    ("annotations", "said", "wanted"),
    [
        ({}, HPA, Objective.EFFICIENCY),
        ({AUTOSCALED: "false"}, "", Objective.BALANCED),
        ({AUTOSCALED: "true"}, AUTOSCALED, Objective.EFFICIENCY),
    ],
)
def test_so_is_a_workload_whose_load_an_autoscaler_follows_unless_the_annotation_forbids_it(annotations, said, wanted):
    world = World(spec(objective=Objective.BALANCED), pods=1)
    world.workload = replace(workload_of(replicas=1, annotations=annotations), autoscaler=HPA)
    world.run(6, 20)
    assert applied(world) is wanted
    assert world.policy.status["targets"][0]["autoscaler"] == said
    world.workload = workload_of(replicas=1)
    world.run(6, 20)
    assert applied(world) is Objective.BALANCED
    told = [each.message for _, each in world.events if each.reason in {"Autoscaled", "NotAutoscaled"}]
    assert told == (
        [
            f"Deployment resnet: its load is followed ({said}); objective Efficiency",
            "Deployment resnet: no autoscaler follows its load any more; objective Balanced",
        ]
        if said
        else []
    )


def test_where_no_load_meets_the_slo_there_are_no_figures():
    fleet = Fleet()
    before = fleet.pass_by(20, 80, 40)
    assert before is not None
    assert fleet.pass_by(20, 80, 40, capacity=0.0) is None
    assert fleet.load.unmet == "m"
    assert fleet.load.now is None
    after = fleet.pass_by(20, 80, 40)
    assert (after.replicas, fleet.load.unmet) == (before.replicas, None)


def test_one_pod_of_several_that_forecasts_nothing_counts_as_the_others():
    load = TargetLoad()
    for now in (5.0, 10.0):
        samples = [sample("0", 60), sample("1", 60), sample("2", 60, capacity=0.0)]
        load.observe(now, samples, ["0", "1", "2"])
    assert load.unmet is None
    assert load.now.load == pytest.approx(1.8)


def test_without_requests_a_capacity_of_nothing_is_no_trouble():
    fleet = Fleet()
    said = fleet.pass_by(20, 0, 0, capacity=0.0)
    assert (said.load, fleet.load.unmet) == (0.0, None)
