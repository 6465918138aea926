from __future__ import annotations

import io
import itertools
import math
import subprocess

import msgspec
import pytest

from carpool.batching.counters import Counters
from carpool.exchange.decision import Observation
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.policy.plain import to_plain
from carpool.policy.spec import BatchingPolicy, Tuning, TuningMode
from carpool.tuning.tuner import Tuner
from carpool_cli.planning.assumptions import for_p99
from carpool_sidecar.frames import LENGTH
from carpool_sidecar.tuning import tuner_process
from carpool_sidecar.tuning.messages import (
    Answered,
    Decided,
    Measured,
    Observations,
    Observed,
    Setup,
    frame,
    read_reply,
)
from carpool_sidecar.tuning.tuner_link import COMMAND
from carpool_sidecar.tuning.tuner_process import AGAIN, FIRST, OLDER, OVERDRAFT, SHARE, Tuners, serve

PARAMETERS = Parameters(max_batch=8, max_wait=Duration(0.0), max_in_flight=1)
SETUP = Setup(to_plain(for_p99(0.05)))


def observed(now, arrivals=0, models=("m",), generation=1):
    counters = Counters()
    for number in range(arrivals):
        counters.arrived(now + number / 1000, 1)
    one = Observed(Observation(now=now, seconds=1.0, stats=counters.snapshot(now)), PARAMETERS, generation)
    return Observations(dict.fromkeys(models, one))


def replies_in(data):
    stream, found = io.BytesIO(data), []
    while length := stream.read(LENGTH):
        found.append(read_reply(stream.read(int.from_bytes(length, "little"))))
    return found


def models_in(data):
    """The models decided upon, in order; None is the end of an observation's."""
    return [reply.model if isinstance(reply, Decided) else None for reply in replies_in(data)]


def test_every_model_gets_a_decision_with_a_reason():
    tuners = Tuners(for_p99(0.05))
    one, two, end = tuners.step(observed(10.0, 5, models="mn"))
    assert (one.model, two.model, end) == ("m", "n", Answered())
    assert one.decision.message
    assert one.decision.parameters == PARAMETERS


def test_each_decision_is_said_before_the_next_is_thought_about(monkeypatch):
    sink, said = io.BytesIO(), []
    step = Tuner.step

    def slow(tuner, observation):
        said.append(models_in(sink.getvalue()))
        return step(tuner, observation)

    monkeypatch.setattr(Tuner, "step", slow)
    serve(io.BytesIO(frame(SETUP) + frame(observed(1.0, models="mno"))), sink)
    assert said == [[], ["m"], ["m", "n"]]
    assert models_in(sink.getvalue()) == ["m", "n", "o", None]


def test_it_answers_every_observation_and_ends_with_its_input():
    sink = io.BytesIO()
    serve(io.BytesIO(frame(SETUP) + frame(observed(1.0)) + frame(SETUP) + frame(observed(2.0)) + b"\x01"), sink)
    assert models_in(sink.getvalue()) == ["m", None, "m", None]


def test_decisions_name_the_generation_that_they_are_about():
    sink = io.BytesIO()
    data = [frame(message) for message in (SETUP, observed(1.0), observed(2.0), observed(3.0, generation=2))]
    serve(io.BytesIO(b"".join(data)), sink)
    assert [each.generation for each in replies_in(sink.getvalue()) if each != Answered()] == [1, 1, 2]


def test_a_model_that_became_another_gets_another_tuner_and_the_others_keep_theirs(monkeypatch):
    made = []

    def tuner(policy, model, parameters):
        made.append(Tuner(policy, model, parameters))
        return made[-1]

    monkeypatch.setattr(tuner_process, "Tuner", tuner)
    tuners = Tuners(for_p99(0.05))
    list(tuners.step(observed(1.0, models="mn")))
    assert len(made) == 2
    again = Observations({**observed(2.0, models="n").models, **observed(2.0, generation=2).models})
    list(tuners.step(again))
    assert len(made) == 3
    list(tuners.step(again))
    assert len(made) == 3


def test_observations_before_the_policy_are_not_answered():
    sink = io.BytesIO()
    serve(io.BytesIO(frame(observed(1.0))), sink)
    assert sink.getvalue() == b""


def test_the_process_is_nothing_but_that():
    data = frame(SETUP) + frame(observed(1.0))
    done = subprocess.run(COMMAND, input=data, capture_output=True, timeout=60, check=True)  # noqa: S603 - our own command
    assert models_in(done.stdout) == ["m", None]
    assert done.stderr == b""


def test_what_is_held_follows_the_parameters_in_force_and_keeps_what_it_learned():
    held = BatchingPolicy(slo=for_p99(0.05).slo, tuning=Tuning(mode=TuningMode.HOLD))
    tuners = Tuners(held)
    first, _ = tuners.step(observed(1.0, 5))
    other = msgspec.structs.replace(PARAMETERS, max_batch=4)
    changed = observed(2.0, 5)
    changed.models["m"] = msgspec.structs.replace(changed.models["m"], parameters=other)
    second, _ = tuners.step(changed)
    assert (first.decision.parameters, second.decision.parameters) == (PARAMETERS, other)
    ((_, tuner),) = tuners._tuners.values()
    assert tuner._history.now == 2.0, "it is the same one"


def test_what_tunes_goes_its_own_way():
    tuners = Tuners(for_p99(0.05))
    next(tuners.step(observed(1.0, 5)))
    changed = observed(2.0, 5)
    changed.models["m"] = msgspec.structs.replace(
        changed.models["m"], parameters=msgspec.structs.replace(PARAMETERS, max_batch=4)
    )
    assert next(tuners.step(changed)).decision.parameters == PARAMETERS


def served(now, models=("m",), seconds=0.005, gap=0.01):
    """Half a second of 100 requests/s, one by one, each 5 ms; with a smaller gap they come all at once."""
    counters = Counters()
    for number in range(50):
        counters.arrived(now - 0.5 + number * gap, 1)
    cells = [(0, 1, 1, 0, 50, 50 * seconds, 50 * seconds**2)]
    stats = msgspec.structs.replace(counters.snapshot(now), cells=cells, batchable=50)
    one = Observed(Observation(now=now, seconds=0.5, stats=stats), PARAMETERS, 1)
    return Observations(dict.fromkeys(models, one))


def test_capacity_is_searched_after_the_decisions_one_model_at_a_time_and_not_all_the_time():
    tuners = Tuners(for_p99(0.05), cpu=lambda: 0.0)
    assert not [r for step in range(20) for r in tuners.step(served(step / 2, models="mn")) if isinstance(r, Measured)]
    told = [list(tuners.step(served(FIRST + step / 2, models="mn"))) for step in range(12)]
    for replies in told:
        kinds = [type(reply) for reply in replies]
        assert kinds[:3] == [Decided, Decided, Answered]
        assert kinds[3:] in ([], [Measured])
    measured = [reply for replies in told for reply in replies if isinstance(reply, Measured)]
    assert [reply.model for reply in measured] == ["m", "n"], "each once in six seconds"
    again = [list(tuners.step(served(FIRST + 6.0 + AGAIN + step / 2, models="mn"))) for step in range(2)]
    assert [reply.model for replies in again for reply in replies if isinstance(reply, Measured)] == ["m", "n"]
    # One row takes 5 ms: at least 200/s one by one, with room for bursts.
    assert measured[0].capacity.rate > 150


def test_searches_of_capacities_take_a_hundredth_of_a_core():
    clock = itertools.count()
    tuners = Tuners(for_p99(0.05), cpu=lambda: float(next(clock)))  # each search takes a second
    measured = [
        (now, reply.model)
        for now in range(10, 800)
        for reply in tuners.step(served(float(now), models="mn"))
        if isinstance(reply, Measured)
    ]
    # The first search of a model does not wait for the rest of another's. That is owed: the mean stays.
    assert measured[:2] == [(25, "m"), (26, "n")]
    assert 800 * SHARE <= len(measured) <= 1 + (800 + OVERDRAFT) * SHARE


def test_the_capacity_of_a_young_model_is_searched_again_soon_and_of_an_old_one_seldom():
    cpu = itertools.count()
    found = [at for at, _, _ in searches([served(step / 2) for step in range(240)], lambda: float(next(cpu)))]
    second = max(OLDER * FIRST, FIRST + AGAIN)
    assert found[:4] == [FIRST, second, OLDER * second, math.ceil(2 * OLDER**2 * second) / 2]
    assert found[-1] - found[-2] > 2 * AGAIN


def searches(steps, cpu=lambda: 0.0):
    tuners = Tuners(for_p99(0.05), cpu=cpu)
    return [
        (step / 2, reply.model, reply.capacity.rate)
        for step, observations in enumerate(steps)
        for reply in tuners.step(observations)
        if isinstance(reply, Measured)
    ]


def test_a_model_that_gets_no_requests_does_not_delay_others():
    idle = [observed(step / 2, 1 if not step else 0, models="n") for step in range(80)]
    both = [Observations({**served(step / 2).models, **each.models}) for step, each in enumerate(idle)]
    assert [at for at, _, _ in searches(both)] == [FIRST, FIRST + AGAIN, FIRST + 2 * AGAIN]


@pytest.mark.parametrize(
    ("change", "share"), [({"seconds": 0.0075}, 0.75), ({"gap": 0.001}, 0.9)], ids=["slow", "bursts"]
)
def test_what_changed_has_a_new_capacity_before_the_last_search_is_paid_for(change, share):
    cpu = itertools.count()
    steps = [served(step / 2, **(change if step >= 100 else {})) for step in range(200)]
    found = searches(steps, lambda: float(next(cpu)))
    *_, (_, _, before) = (each for each in found if each[0] < 50)
    (at, _, after), last, *_ = (each for each in found if each[0] >= 50)
    assert 50 < at <= 53, "three observations show it; the rest lasts until 315 s"
    assert after < share * before
    assert last[0] >= at + AGAIN


def test_a_device_that_changes_all_the_time_takes_at_most_so_much_in_advance():
    cpu = itertools.count()
    steps = [served(step / 2, seconds=0.005 * 2 ** (step // 30 % 2)) for step in range(2400)]
    found = searches(steps, lambda: float(next(cpu)))
    assert len(found) <= 1 + (1200 + OVERDRAFT) * SHARE


def test_of_held_parameters_the_capacity_is_theirs_unless_an_operator_turns_them():
    held = msgspec.structs.replace(for_p99(0.05), tuning=Tuning(mode=TuningMode.HOLD))
    found = {}
    for steered in (False, True):
        tuners = Tuners(held, steered=steered)
        replies = [reply for step in range(40) for reply in tuners.step(served(step / 2))]
        found[steered] = next(reply.capacity for reply in replies if isinstance(reply, Measured))
    assert found[False].parameters == PARAMETERS
    assert found[True].parameters != PARAMETERS


def test_batches_of_copies_are_asked_for_while_larger_ones_are_unknown():
    tuners = Tuners(for_p99(0.05))
    asked = [
        reply.measure for step in range(8) for reply in tuners.step(served(step / 2)) if isinstance(reply, Decided)
    ]
    assert asked == [(2,)] * 8, "twice the one row that was measured"


@pytest.mark.parametrize("mode", [TuningMode.RECOMMEND, TuningMode.HOLD])
def test_a_mode_that_applies_nothing_gets_no_batches_of_copies_unless_steered(mode):
    policy = msgspec.structs.replace(for_p99(0.05), tuning=Tuning(mode=mode))
    for steered, most in ((False, ()), (True, (2,))):
        tuners = Tuners(policy, steered=steered)
        replies = [reply for step in range(8) for reply in tuners.step(served(step / 2))]
        assert max(reply.measure for reply in replies if isinstance(reply, Decided)) == most
