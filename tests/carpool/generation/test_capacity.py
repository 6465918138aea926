from random import Random

import pytest
from engines import LLAMA, SLO

from carpool.generation.calibration import ENOUGH_WINDOWS
from carpool.generation.capacity import Load, carried
from carpool.generation.engine import Engine
from carpool.generation.gate import Gate
from carpool.generation.profiles import EngineProfile
from carpool.generation.requests import Request, Slo
from carpool.generation.simulation import Arrival, Simulation
from carpool.generation.step_model import StepModel

MODEL = StepModel(LLAMA.base, LLAMA.sequence, LLAMA.kv_token, LLAMA.prompt_token)
LOAD = Load(prompt=1000.0, decoded=200.0, held=200.0 * 1100)


def test_a_load_is_carried_at_the_rate_that_fills_the_target():
    load = LOAD
    rate = load.throughput(MODEL, 0.05)
    sequences = rate * 200 * 0.05
    step = LLAMA.seconds(0, sequences * 1100, 0) + LLAMA.sequence * sequences
    assert step / (1 - rate * 1000 * LLAMA.prompt_token) == pytest.approx(0.05, rel=0.01)
    assert load.throughput(MODEL, 0.025) < rate < load.throughput(MODEL, 0.1)


def test_lengths_are_averaged():
    assert Load.of([(1000, 201, 1), (0, 1, 1)]) == Load(500.0, 100.0, 200 * 1100 / 2)
    # Four choices of 201 tokens share the prompt: after 100 steps they hold 1,400 tokens.
    assert Load.of([(1000, 201, 4)]) == Load(1000.0, 800.0, 200 * 1400)


def test_sequences_rate_and_tokens_fit_together():
    found = carried(MODEL, LOAD, 0.05)
    assert found.sequences == pytest.approx(found.rate * 200 * 0.05)
    assert found.tokens == pytest.approx(found.rate * 201)
    assert LOAD.tpot(MODEL, found.sequences) == pytest.approx(0.05, rel=0.01)


def test_the_cache_and_a_limit_of_sequences_bound_it():
    free = carried(MODEL, LOAD, 0.05)
    tight = carried(MODEL, LOAD, 0.05, kv_tokens=11_000.0)
    assert tight.sequences == pytest.approx(10.0)
    # Ten sequences alone are faster than the target, so they end sooner.
    assert free.rate * 10 / free.sequences < tight.rate < free.rate
    assert carried(MODEL, LOAD, 0.05, most=4).sequences == 4


def test_nothing_is_carried_where_one_alone_is_too_slow_or_answers_have_one_token():
    assert carried(MODEL, LOAD, 0.005) is None
    assert carried(MODEL, Load(1000.0, 0.0, 0.0), 0.05) is None


def test_the_capacity_of_an_engine_is_unknown_until_it_has_enough_samples():
    # A token takes 1 ms: 25 answers of 21 tokens are one equation of the step model.
    gate = Gate(SLO, StepModel(*MODEL.coefficients[:2], *MODEL.coefficients[-2:]))
    now, known = 0.0, []
    for key in range(25 * ENOUGH_WINDOWS + 10):
        request = Request(key, now, 60)
        gate.arrive(request, now)
        gate.first_token(request, now + 0.002)
        gate.progress(now + 0.022, 20)
        gate.ended(request, now + 0.022, 21)
        now += 0.25
        gate.progress(now, 0.0)
        known.append(gate.carries() is not None)
    assert not any(known[: 25 * (ENOUGH_WINDOWS - 1)])
    assert known[-1]


def test_a_gate_says_what_its_engine_carries():
    profile = EngineProfile(name="a100", source="rounded", kv_tokens=400_000, step=LLAMA)
    gate = Gate(SLO, StepModel(*(2 * value for value in MODEL.coefficients[:2]), *MODEL.coefficients[-2:]))
    assert gate.carries() is None
    random = Random(1)
    times = [i / 20 + random.random() / 20 for i in range(2500)]
    arrivals = [Arrival(Request(i, time, 600), 150) for i, time in enumerate(times)]
    outcome = Simulation(arrivals, Engine(profile, Random(1)), gate, until=150.0).run()
    good = sum(served.good(SLO) for served in outcome.served) / 125
    found = gate.carries()
    # 20/s are more than it carries: the answers in time are its capacity.
    assert found.rate == pytest.approx(good, rel=0.1)
    assert found.tokens == pytest.approx(150 * found.rate, rel=0.01)
    gate.configure(Slo(2.0), gate.limits)
    assert gate.carries() is None


@pytest.mark.parametrize(
    ("model", "load", "tpot", "rate"),
    [
        (StepModel(0.1, 0.02, 1e-6, 0.0), Load.of([(20, 1000, 1)]), 0.15, 0.0163),
        (StepModel(0.0115, 4e-5, 8e-8, 5.5e-5), Load.of([(2, 16_000, 1)]), 0.03, 0.0567),
    ],
    ids=["slow engine", "long answers"],
)
def test_less_than_a_request_a_minute_is_no_rounding_error(model, load, tpot, rate):
    assert load.throughput(model, tpot) == pytest.approx(rate, rel=0.01)


def test_a_cache_that_nobody_fills_is_no_limit():
    load = Load(100.0, 50.0, 0.0)
    assert carried(MODEL, load, 0.05, kv_tokens=1e5) == carried(MODEL, load, 0.05)
