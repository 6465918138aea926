from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from carpool.batching.counters import ModelStats, Stats
from carpool.exchange.report import Alone, Forwarded, Lane, ModelEntry, Queue, Report
from carpool.exchange.token_streams import GateState, TokenStreams
from carpool.policy.parameters import Parameters
from carpool.policy.spec import Axis, BatchingPolicy, Model, Tuning, TuningMode
from carpool_cli.live import running
from carpool_cli.live.admin_client import AdminError, Decided, Explained, Explanation
from carpool_cli.planning.assumptions import for_p99

# Sizes 1 to 24, fifty batches each: batch latency 5 + 0.5 b ms, without noise.
CELLS = [(0, b, 1, 0, 50, 50 * (0.005 + 0.0005 * b), 50 * (0.005 + 0.0005 * b) ** 2) for b in range(1, 25)]
KEPT = Decided(Parameters(), change=False, reason="Converged", message="nothing is better")


def lane(**change):
    settings = {
        "parameters": Parameters(max_batch=8),
        "pass_through": False,
        "queued_requests": 0,
        "cap": 8,
        "quarantined": False,
        "service_seconds": tuple(0.005 + 0.0005 * b for b in range(65)),
        "executors": 1,
        "arrivals": [(100.0 + 0.01 * i, 1) for i in range(2000)],
    }
    return Lane(**settings | change)


def stats(**change):
    return ModelStats(**{"arrivals": 2000, "cells": CELLS, "durations": [0] * 66} | change)


class Client(NamedTuple):
    """A sidecar that was asked."""

    answer: Report
    promised: BatchingPolicy = for_p99(0.05)
    explained: Explanation = Explanation(True, [])
    address: str = "http://127.0.0.1:9090"

    def report(self, *, arrivals):
        assert arrivals
        return self.answer

    def policy(self):
        return self.promised

    def explanation(self):
        return self.explained

    def data_address(self):
        return "http://127.0.0.1:8263"


def client(lanes=None, models=None, at=120.0, **change):
    answer = Report(
        stats=Stats(at=at, models=models or {"m": stats()}),
        uptime_seconds=20.0,
        ready=True,
        readiness="ready",
        generation=1,
        slo_seconds=0.05,
        queue=Queue(rows=0, in_flight=0, slots=1),
        lanes=lanes or {"m": lane()},
    )
    return Client(replace(answer, **change))


@pytest.mark.parametrize("mode", TuningMode)
@pytest.mark.parametrize(("tuned", "target"), [(True, ""), (False, "ns/Deployment/m"), (False, "")])
def test_it_follows_the_load_where_a_tuner_may_apply_what_it_decides(mode, tuned, target):
    promised = replace(for_p99(0.05), tuning=Tuning(mode=mode))
    asked = client(target=target)._replace(promised=promised, explained=Explanation(tuned, []))
    assert running.read(asked, None).retunes is (mode is TuningMode.APPLY and (tuned or bool(target)))


def test_the_state_of_the_only_model_is_read_from_a_running_sidecar():
    decisions = [Explained("m", 5.0, KEPT), Explained("m", 9.0, KEPT), Explained("x", 10.0, KEPT)]
    found = running.read(client()._replace(explained=Explanation(True, decisions)), None)
    assert (found.model, found.parameters.max_batch, len(found.arrivals)) == ("m", 8, 2000)
    assert (found.limits.max_batch, found.limits.max_wait, found.largest_safe) == (64, 0.025, None)
    assert (found.decision.at, found.p99) == (9.0, None)
    assert (found.since_last, found.stopped) == (pytest.approx(0.01), False)
    assert running.read(client(at=160.0), None).stopped
    assert found.service.sizes == tuple(range(1, 25))
    assert found.service.time(10) == pytest.approx(0.010)
    assert found.service.time(64) == pytest.approx(0.037)
    # One batch in flight is all that was ever tried: two would queue, as far as anybody knows.
    assert found.service.executors_for(4) == 1
    assert [note[:37] for note in found.notes] == ["no more than 1 in flight was seen the"]


def test_t_of_b_has_the_tuners_level_and_the_counters_doubts():
    halved = lane(service_seconds=tuple((0.005 + 0.0005 * b) / 2 for b in range(65)))
    counted, found = running.learned(stats(), lane(service_seconds=None)), running.learned(stats(), halved)
    for rows in (1, 10, 24, 48, 64):
        assert found.time(rows) == pytest.approx(counted.time(rows) / 2)
        assert found.upper(rows) == pytest.approx(counted.upper(rows) / 2, rel=0.02)
    assert (found.largest_measured, found.noise, found.samples) == (24, counted.noise, counted.samples)
    # The tuner's spread is without the pauses of a host that the counters have.
    assert running.learned(stats(), lane(service_noise=0.07)).noise == 0.07


@given(st.floats(1e-4, 1.0), st.lists(st.floats(1e-4, 1.0), min_size=2, max_size=24))
def test_sizes_the_tuner_holds_for_equal_stay_so_to_the_last_digit(level, counted):
    cells = [(0, rows, 1, 0, 50, 50 * seconds, 50 * seconds**2) for rows, seconds in enumerate(counted, 1)]
    found = running.learned(stats(cells=cells), lane(service_seconds=(0.0, *[level] * 64)))
    for times in (found.means, found.lowers, found.uppers):
        assert list(times) == sorted(times)
    assert found.means == pytest.approx([level] * len(counted))


def test_t_of_b_goes_on_as_the_tuner_says_where_it_was_not_measured():
    cells = [cell for cell in CELLS if cell[1] in {8, 16}]
    table = tuple(0.004 + 0.001 * b for b in range(33))
    found = running.learned(stats(cells=cells), lane(service_seconds=table))
    assert [found.time(rows) for rows in (1, 8, 12, 32)] == pytest.approx([table[rows] for rows in (1, 8, 12, 32)])


def test_a_request_larger_than_the_tuners_table_keeps_its_share():
    cells = [*CELLS, (0, 100, 1, 0, 50, 50 * 0.055, 50 * 0.055**2)]
    found = running.learned(stats(cells=cells), lane(service_seconds=tuple(0.010 + 0.001 * b for b in range(65))))
    assert found.time(100) == pytest.approx(2 * 0.055)


def test_nothing_measured_is_no_curve():
    assert running.learned(stats(cells=[]), lane()) is None


def test_sizes_that_can_not_be_are_left_out():
    safe = client(lanes={"m": lane(ceiling=20)}, models={"m": stats()})
    found = running.read(safe, None)
    assert (found.limits.max_batch, found.largest_safe) == (19, 19)
    entry = ModelEntry(name="m", version="", lane="m", merges=True, max_batch=16, axis="First")
    assert running.read(client(), None).limits.max_batch == 64
    known = Client(replace(client().answer, models=[entry]))
    assert running.read(known, None).limits.max_batch == 16
    single = Client(replace(client().answer, models=[replace(entry, merges=False, max_batch=None, axis="None: why")]))
    found = running.read(single, None)
    assert found.limits.max_batch == 1
    assert found.notes[0] == "its requests are not merged (None: why): no configuration changes that"


def test_the_models_own_bounds_count():
    policy = replace(for_p99(0.05), models=(Model(name="m", axis=Axis.FIRST, max_batch=12),))
    assert running.read(client()._replace(promised=policy), None).limits.max_batch == 12


def test_a_model_is_named_where_there_are_several():
    two = client(lanes={"a": lane(), "b": lane(), "": lane()}, models={"a": stats(), "b": stats(), "": ModelStats()})
    with pytest.raises(AdminError, match="serves 2 models: name one with --model, of a, b"):
        running.read(two, None)
    assert running.read(two, "b").model == "b"
    with pytest.raises(AdminError, match=r"no request for a model 'c' has come to .*: there were some for a, b"):
        running.read(two, "c")


def test_token_streams_are_said_not_to_be_forecast():
    gate = GateState(
        ttft=2.0, tpot=0.05, forecast_tpot=0.04, margin=1.1, step_seconds=0.01, sequence_seconds=4e-5,
        kv_token_seconds=8e-8, prompt_token_seconds=5.5e-5, kv_size=None,
    )  # fmt: skip
    served = client(models={"m": stats(arrivals=0)})
    with pytest.raises(AdminError, match="no request that could be batched has come"):
        running.read(served, None)
    with pytest.raises(AdminError, match=r"http://127\.0\.0\.1:9090 serves token streams, which their engine batches"):
        running.read(Client(replace(served.answer, token_streams=TokenStreams(gate=gate))), None)


def test_requests_for_other_paths_are_said_to_have_come():
    embed = Forwarded(method="POST", path="/embed", requests=42, hits=42, durations=[])
    passed = client(models={"m": stats(arrivals=0)}, forwarded=[embed, replace(embed, method="GET")])
    with pytest.raises(AdminError, match=r"yet, but 42 to other paths \(carpool explain http.* names them\): send inf"):
        running.read(passed, None)


def test_requests_that_name_no_model_are_a_model():
    assert running.read(client(lanes={"": lane()}, models={"": stats()}), None).name == "model"


@pytest.mark.parametrize(
    ("lanes", "counted", "says"),
    [
        ({}, {"arrivals": 0}, "no request that could be batched has come to http://127.0.0.1:9090 yet"),
        ({}, {"arrivals": 0}, "send inference requests of V1 or V2, e.g. carpool bench http://127.0.0.1:8263"),
        ({"arrivals": []}, {}, "does not say when they came: it is an older sidecar's, update it"),
        ({"arrivals": [(1.0, 1)]}, {"arrivals": 1}, "a single request to m is no load: send more"),
        ({}, {"cells": []}, r"batch latency of m is unknown: no batch was measured yet"),
    ],
)
def test_what_is_missing_names_the_fix(lanes, counted, says):
    with pytest.raises(AdminError, match=says):
        running.read(client(lanes={"m": lane(**lanes)}, models={"m": stats(**counted)}), None)


def test_what_a_forecast_leaves_out_is_said():
    other = stats(cells=[(0, 1, 1, 0, 10, 0.6, 0.04)])
    both = client(
        lanes={"m": lane(replaced=1, service_seconds=None), "x": lane()},
        models={"m": stats(), "x": other},
        at=200.0,
        alone=[Alone("m", "encoded", 100), Alone("m", "mixed-rows", 100), Alone("x", "encoded", 2000)],
    )
    said = running.read(both, "m").notes[1:]
    assert said[0] == "the last request came 80s ago: this is the load of that time"
    assert said[1] == "10% of its requests can't be merged (encoded, mixed-rows); the forecast merges all"
    # 0.6 s of the device's, where the model asked for took 50 * 24 * 11.25 ms = 13.5 s.
    assert said[2].startswith("other models took 4% of the batches' seconds there")
    assert said[3].startswith("the model was replaced")
    assert said[4].startswith("its tuner reports no batch latency")
    few = running.read(client(models={"m": stats(cells=[(0, 1, 1, 0, 5, 0.0275, 0.00015125)])}), None).notes
    assert few[-1] == "batch latency is from 5 batches only"


def test_who_stepped_aside_says_so():
    aside = lane(parameters=Parameters(max_batch=8, pass_through=True, max_in_flight=4))
    assert running.read(client(lanes={"m": aside}, at=160.0), None).notes[-1].endswith("it passes through since")
