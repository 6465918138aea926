from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from carpool.batching.requests import Estimate
from carpool.exchange.decision import Decision, Reason
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool_sidecar.config.settings import parse
from carpool_sidecar.tuning import control as control_module
from carpool_sidecar.tuning.decisions import KEPT
from carpool_sidecar.tuning.messages import Decided

TUNED = {"parameters": {}}
ESTIMATE = Estimate(times=(0.0, 0.01), upper=(0.0, 0.02))


def decision(batch=4, *, change=True, reason=Reason.SAVES_DEVICE_TIME, **fields):
    parameters = Parameters(max_batch=batch, max_wait=Duration(0.001), max_in_flight=1)
    return Decision(
        parameters=parameters, change=change, reason=reason, message=f"batch {batch}", estimate=ESTIMATE, **fields
    )


async def test_the_tuner_process_sees_the_traffic_and_its_decisions_are_explained(world):
    sidecar, client = await world.start(**TUNED)
    admin = world.client(sidecar.admin.address)
    for number in range(20):
        assert (await client.predict(b"%d" % number)).status == 200
    await world.until(lambda: sidecar.control.decisions.recent)
    explained = (await admin.get(b"/v1/explain")).json
    assert explained["tuned"]
    assert explained["tunerPid"] == sidecar.control.link.pid
    assert explained["decisions"][0]["model"] == "m"
    assert explained["decisions"][0]["decision"]["message"]


async def test_a_decision_is_applied_learned_from_and_counted(world):
    sidecar = await world.sidecar(**TUNED)
    lane = sidecar.batcher.model("m")
    sidecar.control._decided("m", decision(4, shed_slo=True))
    assert lane.parameters.max_batch == 4
    assert (lane.belief.estimate, lane.belief.shed_slo) == (ESTIMATE, True)
    assert sidecar.control.decisions.counts["Change", "SavesDeviceTime"] == 1
    sidecar.control._decided("m", decision(16, change=False))
    assert lane.parameters.max_batch == 4


async def test_first_calls_end_once_the_tuner_keeps_what_it_reports(world):
    # "batch 32, 1 in flight" was reported while two calls at once were in force, which hardly share a batch.
    sidecar = await world.sidecar(**TUNED)
    lane = sidecar.batcher.model("m")
    kept = Decision(parameters=lane.parameters, change=False, reason=Reason.CONVERGED, message="kept")
    sidecar.control._decided("m", kept)
    assert lane.first_calls is not None, "it says nothing of what is best"
    sidecar.control._decided("m", replace(kept, decided=True))
    assert lane.first_calls is not None, "nor how many calls the server computes at once"
    for calls in (1, 1, 2, 2, 2, 2):
        lane.first_calls.answered(calls, calls * 0.01)
        lane.follow(lane.first_calls)
    assert lane.first_calls.merges
    sidecar.control._decided("m", replace(kept, decided=True))
    assert lane.first_calls is None
    assert lane.in_force == lane.parameters


async def test_while_first_calls_go_on_it_is_said_what_is_in_force(world):
    sidecar = await world.sidecar(**TUNED)
    lane = sidecar.batcher.model("m")
    admin = world.client(sidecar.admin.address)
    assert lane.in_force.pass_through
    report = (await admin.get(b"/v1/stats")).json
    assert report["lanes"]["m"]["parameters"]["passThrough"]
    assert (await admin.get(b"/v1/config")).json["parameters"]["m"]["passThrough"]


async def test_an_operator_names_a_model_once_it_has_decided_on_it(world):
    plain = {"maxBatch": 32, "maxWait": "0s", "maxInFlight": 1}
    target = {"target": "ns/Deployment/m"}
    sidecar = await world.sidecar(parameters={"*": plain}, **target)
    lane = sidecar.batcher.model("m")
    sidecar.versions.use(parse(world.config(parameters={"*": plain}, **target)))
    assert lane.first_calls is not None
    sidecar.versions.use(parse(world.config(parameters={"*": plain, "m": plain}, **target)))
    assert lane.first_calls is None
    assert sidecar.batcher.model("other").first_calls is not None


async def test_a_model_that_an_operator_names_no_more_goes_back_to_what_first_calls_led_to(world):
    """A trial that failed ends so. The baseline, which never ran there, is one call at a time."""
    plain, tried = ({"maxBatch": 32, "maxWait": wait, "maxInFlight": 1} for wait in ("0s", "5ms"))
    target = {"target": "ns/Deployment/m"}
    sidecar = await world.sidecar(parameters={"*": plain}, **target)
    lane = sidecar.batcher.model("m")
    for calls in (1, 1, 2, 2, 2, 2):
        lane.first_calls.answered(calls, 0.01)
        lane.follow(lane.first_calls)
    ran = lane.in_force
    assert (ran.max_in_flight, ran.pass_through) == (4, True)

    sidecar.versions.use(parse(world.config(parameters={"*": plain, "m": tried}, **target)))
    assert lane.in_force.max_in_flight == 1
    sidecar.versions.use(parse(world.config(parameters={"*": plain}, **target)))
    assert lane.in_force == ran

    bounds = {"bounds": {"maxInFlight": {"max": 2}}}
    sidecar.versions.use(parse(world.config(parameters={"*": plain}, **target, policy=bounds)))
    assert lane.in_force == replace(ran, max_in_flight=2)
    sidecar.control.forget("m")
    sidecar.versions.use(parse(world.config(parameters={"*": plain}, **target)))
    assert lane.in_force.max_in_flight == 1, "of another model it is not known"


async def test_decisions_that_repeat_are_reported_once_with_how_often(world):
    sidecar = await world.sidecar(**TUNED)
    control = sidecar.control
    for _ in range(3):
        control._decided("m", decision(change=False, reason=Reason.CONVERGED))
    control._decided("m", decision(5))
    control._decided("m", decision(change=False, reason=Reason.CONVERGED))
    assert [(each.decision.reason.value, each.times) for each in control.decisions.recent] == [
        ("Converged", 3),
        ("SavesDeviceTime", 1),
        ("Converged", 1),
    ]
    for batch in range(1, 2 * KEPT):
        control._decided("m", decision(batch))
    assert len(control.decisions.recent) == KEPT


async def test_a_forecast_that_is_off_is_in_metrics_report_and_log_until_it_is_right(world, caplog):
    caplog.set_level("INFO")
    sidecar, _ = await world.start(**TUNED)
    admin = world.client(sidecar.admin.address)
    sidecar.batcher.model("m")
    said = "p99 300ms observed for 10 s, 60ms forecast"
    for alarm in (said, said, "", ""):
        sidecar.control._decided("m", decision(change=False, reason=Reason.FORECAST_OFF, alarm=alarm))
        text = (await admin.get(b"/metrics")).body.decode()
        assert f'carpool_forecast_alarm{{model="m"}} {1.0 if alarm else 0.0}' in text
        assert (await admin.get(b"/v1/stats")).json["lanes"]["m"]["forecastAlarm"] == alarm
    assert (await admin.get(b"/v1/explain")).json["decisions"][-1]["decision"]["reason"] == "ForecastOff"
    logged = [record.message for record in caplog.records if "forecast" in record.message]
    assert logged == ["the forecast differs from the answers", "the forecast matches the answers again"]
    sidecar.control._decided("m", decision(change=False, alarm=said))
    sidecar.control.forget("m")
    assert sidecar.control.decisions.alarms == {}


async def test_callers_with_keys_of_their_own_are_counted_as_such(world):
    sidecar, client = await world.start()
    for number in range(20):
        headers = [(b"authorization", b"Bearer %d" % number)]
        assert (await client.predict(b"1", headers=headers)).status == 200
    stats = sidecar.batcher.stats(sidecar.clock()).models["m"]
    assert (stats.arrivals, stats.batchable) == (20, 1), "the first is as good as any"


async def test_with_fixed_parameters_service_times_are_learned_and_nothing_is_turned(world):
    sidecar, client = await world.start()
    async with asyncio.timeout(60):
        while (
            sidecar.batcher.model("m").belief.estimate is None
        ):  # what a pause of this host spoils is not learned from
            assert (await client.predict(b"1")).status == 200
    assert sidecar.batcher.model("m").parameters.max_batch == 8
    assert {each.decision.reason for each in sidecar.control.decisions.recent} <= {
        Reason.HELD, Reason.TOO_FEW_SAMPLES, Reason.HOST_STALLED,
    }  # fmt: skip


async def test_new_limits_hold_at_once_and_tuned_parameters_within_them_stay(world):
    sidecar = await world.sidecar(**TUNED)
    sidecar.control._decided("m", decision(6))
    sidecar.control.configure(parse(world.config(parameters={}, policy={"bounds": {"maxBatch": {"max": 32}}})))
    assert sidecar.batcher.model("m").parameters.max_batch == 6
    sidecar.control.configure(parse(world.config(parameters={}, policy={"bounds": {"maxBatch": {"max": 3}}})))
    assert sidecar.batcher.model("m").parameters.max_batch == 3


async def test_tuning_begins_and_ends_with_the_configuration(world):
    sidecar = await world.sidecar(**TUNED)
    control = sidecar.control
    before = control.observer.generation("m")
    control.configure(parse(world.config(parameters={"*": {"maxBatch": 2}})))
    assert not control.tunes
    assert sidecar.batcher.model("m").parameters.max_batch == 2
    control._heard(Decided("m", decision(7), before))  # was under way
    assert sidecar.batcher.model("m").parameters.max_batch == 2
    control.configure(parse(world.config(parameters={})))
    assert control.tunes


async def test_decisions_about_what_was_before_are_refused(world):
    sidecar = await world.sidecar(**TUNED)
    control, lane = sidecar.control, sidecar.batcher.model("m")
    control._heard(Decided("m", decision(6), control.observer.generation("m")))
    assert lane.parameters.max_batch == 6
    before = control.observer.generation("m")
    control.configure(parse(world.config(parameters={}, policy={"bounds": {"maxBatch": {"max": 3}}})))
    control._heard(Decided("m", decision(6), before))  # was on its way
    assert lane.parameters.max_batch == 3
    before = control.observer.generation("m")
    control.forget()
    control._heard(Decided("m", decision(2), before))  # of the model that was replaced
    assert (lane.parameters.max_batch, lane.belief.estimate) == (3, None)
    control._heard(Decided("m", decision(2), control.observer.generation("m")))
    assert (lane.parameters.max_batch, lane.belief.estimate) == (2, ESTIMATE)


async def test_a_restarted_model_is_forgotten(world):
    sidecar = await world.sidecar(**TUNED)
    sidecar.control._decided("m", decision(4))
    sidecar.control.forget()
    assert sidecar.batcher.model("m").belief.estimate is None
    assert sidecar.batcher.model("m").parameters.max_batch == 4


@pytest.mark.pure
async def test_a_fault_costs_an_interval_and_not_the_tuning(world, monkeypatch, caplog):
    monkeypatch.setattr(control_module, "INTERVAL", 0.0)
    sidecar = await world.sidecar(**TUNED)
    control, stats = sidecar.control, sidecar.batcher.stats
    admin = world.client(sidecar.admin.address)
    monkeypatch.setattr(sidecar.batcher, "stats", None)
    await world.until(lambda: control.errors >= 5)
    monkeypatch.setattr(sidecar.batcher, "stats", stats)
    sidecar.batcher.model("m")
    await world.until(lambda: control.decisions.counts)
    errors = control.errors
    assert errors < 2 ** caplog.messages.count("an error in tuning; it continues") <= 2 * errors
    assert b"carpool_tuner_errors_total %d.0" % errors in (await admin.get(b"/metrics")).body


@pytest.mark.pure
async def test_a_decision_that_fails_costs_no_other(world, monkeypatch):
    sidecar = await world.sidecar(**TUNED)
    control, lane = sidecar.control, sidecar.batcher.model("m")
    with monkeypatch.context() as broken:
        broken.setattr(sidecar.batcher, "configure", None)
        control._heard(Decided("m", decision(4), control.observer.generation("m")))
    assert control.errors == 1
    control._heard(Decided("m", decision(6), control.observer.generation("m")))
    assert lane.parameters.max_batch == 6


async def test_a_model_that_became_another_costs_no_other_what_was_learned(world, monkeypatch):
    monkeypatch.setattr(control_module, "INTERVAL", 3600.0)
    sidecar, client = await world.start(**TUNED)
    control, batcher = sidecar.control, sidecar.batcher
    for model in ("m", "n"):
        batcher.model(model)
        async with asyncio.timeout(60):
            # The first of its size is cold, and what a pause of this host spoils is no sample.
            while not batcher.stats(sidecar.clock()).models[model].cells:
                await client.predict(b"1", model=model)
    for model in ("m", "n"):
        control._heard(Decided(model, decision(4), control.observer.generation("m")))
    before = control.observer.generation("m")
    control.forget("m")
    assert [(lane.name, lane.belief.estimate) for lane in batcher.models()] == [("m", None), ("n", ESTIMATE)]

    observed = []
    monkeypatch.setattr(control.link, "send", lambda message: observed.append(message) or len(observed) > 1)
    for _ in range(3):  # the first is not taken
        control.observe()
    assert all(
        {name: one.generation for name, one in each.models.items()} == {"m": before + 1, "n": before}
        for each in observed
    )
    m, n = ([each.models[name].observation.stats for each in observed] for name in ("m", "n"))
    assert [(bool(stats.arrivals), bool(stats.cells)) for stats in m] == [(True, False), (True, False), (False, False)]
    assert [(bool(stats.arrivals), bool(stats.cells)) for stats in n] == [(True, True), (True, True), (False, False)]

    for model, generation in (("m", before), ("n", before + 1)):  # of before, and of what never was
        control._heard(Decided(model, decision(2), generation))
    assert [lane.parameters.max_batch for lane in batcher.models()] == [4, 4]
    for model, generation in (("m", before + 1), ("n", before)):
        control._heard(Decided(model, decision(2), generation))
    assert [lane.parameters.max_batch for lane in batcher.models()] == [2, 2]
    control.forget()
    for model, generation in (("m", before + 1), ("n", before)):
        control._heard(Decided(model, decision(3), generation))
    assert [lane.parameters.max_batch for lane in batcher.models()] == [2, 2]
