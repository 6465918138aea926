from __future__ import annotations

import asyncio

import msgspec
import pytest

from carpool.batching.counters import ModelStats, Stats
from carpool.forecasting.capacity import Capacity
from carpool.policy.parameters import Parameters
from carpool_sidecar.tuning.messages import Measured
from carpool_sidecar.tuning.replica_load import SPAN, LoadWatch, Utilization

HUNDRED = Capacity(100.0, 80.0, Parameters(max_batch=8))


def stats(at, busy=0.0, *, work=None, **arrivals):
    """Counters at a time: all that each model ever got, and the seconds that its batches took."""
    work = {} if work is None else work
    cells = {name: [(0, 1, 1, 0, 1, work.get(name, busy), 0.0)] for name in arrivals}
    return Stats(
        at,
        device_busy=busy,
        models={name: ModelStats(arrivals=count, cells=cells[name]) for name, count in arrivals.items()},
    )


def watched(*looks):
    watch = LoadWatch(looks[0])
    for look in looks[1:]:
        watch.look(look)
    return watch


def test_the_load_is_the_rate_of_the_last_seconds_over_the_capacity():
    watch = watched(*(stats(0.5 * step, m=25 * step) for step in range(21)))
    watch.measured("m", HUNDRED)
    now = watch.now({}, {})
    assert now.models["m"].rate == pytest.approx(50.0)
    assert now.models["m"].load == now.load == pytest.approx(0.5)
    assert (now.models["m"].capacity, now.models["m"].capacity_lower) == (100.0, 80.0)


def test_what_the_baseline_carries_is_said_where_there_is_one():
    watch = watched(stats(0.0, m=0, n=0), stats(10.0, m=500, n=500))
    watch.measured("m", HUNDRED)
    watch.measured("n", Capacity(100.0, 80.0, Parameters(), by_hand=60.0))
    found = watch.now({}, {}).models
    assert (found["m"].capacity_by_hand, found["n"].capacity_by_hand) == (None, 60.0)


def test_a_jump_of_the_load_is_whole_after_the_span():
    steps = [stats(0.5 * step, m=10 * step) for step in range(200)]
    last = steps[-1]
    later = [stats(last.at + 0.5 * step, m=last.models["m"].arrivals + 45 * step) for step in range(1, 80)]
    watch = watched(*steps, *(look for look in later if look.at - last.at <= SPAN + 2))
    watch.measured("m", HUNDRED)
    assert watch.now({}, {}).load == pytest.approx(0.9)


def test_models_add_up():
    watch = watched(stats(0.0, m=0, n=0), stats(10.0, m=500, n=300))
    watch.measured("m", HUNDRED)
    watch.measured("n", Capacity(300.0, 300.0, Parameters()))
    assert watch.now({}, {}).load == pytest.approx(0.5 + 0.1)


def test_requests_of_a_model_that_was_never_measured_leave_the_load_unknown():
    watch = watched(stats(0.0, m=0, n=0), stats(10.0, m=500, n=1))
    watch.measured("m", HUNDRED)
    assert watch.now({}, {}).load is None
    idle = watched(stats(0.0, m=0), stats(10.0, m=0))
    assert idle.now({}, {}).load == 0.0, "nothing comes: nothing is needed"


def test_a_model_that_was_forgotten_is_unknown_again():
    watch = watched(stats(0.0, m=0), stats(10.0, m=10))
    watch.measured("m", HUNDRED)
    watch.forget("m")
    assert watch.now({}, {}).load is None
    watch.measured("m", HUNDRED)
    watch.forget()
    assert watch.now({}, {}).load is None
    watch.measured("m", HUNDRED)
    watch.look(stats(11.0, n=0))  # m is no model any more
    watch.look(stats(12.0, n=0, m=5))
    assert watch.now({}, {}).load is None


def test_counters_that_began_anew_are_no_negative_rate():
    watch = watched(stats(0.0, m=500), stats(10.0, m=20))
    assert watch.now({}, {}).models["m"].rate == 0.0


def test_utilization_is_of_the_last_seconds_and_says_what_batching_would_leave_of_it():
    watch = watched(stats(0.0, 0.0, m=0), stats(10.0, 6.0, m=100))
    now = watch.now({"m": Utilization(0.58, 0.6, 0.29)}, {})
    assert now.utilization == pytest.approx(0.6)
    assert now.lowest_utilization == pytest.approx(0.3)
    assert watch.now({}, {}).lowest_utilization == pytest.approx(0.6), "nothing is forecast yet"


def test_of_two_models_those_with_requests_count():
    # Both forecasts are of the whole device: batching of one model saves a third of it, and of the other a half.
    forecasts = {"m": Utilization(0.6, 0.6, 0.4), "n": Utilization(0.6, 0.6, 0.3)}
    busy = watched(stats(0.0, 0.0, m=0, n=0), stats(10.0, 6.0, m=100, n=100))
    assert busy.now(forecasts, {}).lowest_utilization == pytest.approx(0.6 * (1 - 1 / 3 - 1 / 2))
    idle = watched(stats(0.0, 0.0, m=0, n=50), stats(10.0, 6.0, m=100, n=50))
    assert idle.now(forecasts, {}).lowest_utilization == pytest.approx(0.4), "n was forecast for an earlier load"


def test_when_a_load_begins_the_lowest_utilization_is_not_0():
    watch = watched(stats(0.0, 0.0, m=0), stats(10.0, 2.0, m=100))
    assert watch.now({"m": Utilization(0.9, 0.6, 0.45)}, {}).lowest_utilization == pytest.approx(0.1)


def test_a_server_that_computes_several_batches_at_once_is_busy_by_their_share():
    # Eight seconds with a batch in flight. At server concurrency 4 that is two seconds of work for each of the four.
    looks = stats(0.0, 0.0, m=0), stats(10.0, 8.0, work={"m": 8.0}, m=100)
    assert watched(*looks).now({}, {"m": 4}).utilization == pytest.approx(0.2)
    # At server concurrency 1, two in flight queue at the server: the wall time counts.
    queued = stats(0.0, 0.0, m=0), stats(10.0, 8.0, work={"m": 16.0}, m=100)
    assert watched(*queued).now({}, {"m": 1}).utilization == pytest.approx(0.8)


@pytest.mark.usefixtures("untuned")
async def test_the_admin_port_says_how_full_the_replica_is(world):
    sidecar, client = await world.start(parameters={})
    admin = world.client(sidecar.admin.address)
    control = sidecar.control
    assert (await admin.get(b"/capacity")).json["load"] == 0.0
    assert (await client.predict(b"1")).status == 200
    control._load = LoadWatch(stats(0.0, m=0))
    control._load.look(stats(10.0, m=500))
    answer = await admin.get(b"/capacity")
    assert (answer.status, answer.json["load"]) == (503, None)
    assert b"\ncarpool_load_ratio " not in (await admin.get(b"/metrics")).body
    control._heard(Measured("m", HUNDRED, control.observer.generation("m") - 1))
    assert (await admin.get(b"/capacity")).status == 503, "of what was before"
    control._heard(Measured("m", HUNDRED, control.observer.generation("m")))
    answer = await admin.get(b"/capacity")
    assert answer.status == 200
    assert answer.json["load"] == pytest.approx(0.5)
    assert answer.json["models"]["m"]["capacityLower"] == 80.0
    text = (await admin.get(b"/metrics")).body.decode()
    assert "carpool_load_ratio 0.5" in text
    assert 'carpool_capacity_requests_per_second{model="m"} 100.0' in text


async def test_the_tuner_process_measures_the_capacity_of_what_is_served(world):
    sidecar, client = await world.start(parameters={})
    async with asyncio.timeout(60):
        # What a pause of this host spoils is not learned from.
        while not any(each.capacity is not None for each in sidecar.control.load().models.values()):
            assert (await client.predict(b"1")).status == 200
    load = sidecar.control.load().models["m"]
    assert 0 < load.capacity_lower <= load.capacity
    msgspec.json.encode(sidecar.control.load())
