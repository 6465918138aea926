from __future__ import annotations

import io
import subprocess

from carpool.policy import Duration, Parameters, for_p99, to_plain
from carpool.statistics import Counters
from carpool.tuner import Observation
from carpool_sidecar.tuner_link import COMMAND
from carpool_sidecar.tuner_process import Tuners, serve
from carpool_sidecar.wire import LENGTH, Observations, Observed, Setup, frame, read_decisions

PARAMETERS = Parameters(max_batch=8, max_wait=Duration(0.0), max_in_flight=1)
SETUP = Setup(to_plain(for_p99(0.05)), 1)


def observed(now, arrivals=0):
    counters = Counters()
    for number in range(arrivals):
        counters.arrived(now + number / 1000, 1)
    return Observations({"m": Observed(Observation(now=now, seconds=1.0, stats=counters.snapshot(now)), PARAMETERS)})


def decisions_in(data):
    stream, found = io.BytesIO(data), []
    while length := stream.read(LENGTH):
        found.append(read_decisions(stream.read(int.from_bytes(length, "little"))))
    return found


def test_every_model_gets_a_decision_with_a_reason():
    tuners = Tuners(for_p99(0.05), 1)
    decisions = tuners.step(observed(10.0, 5)).models
    assert decisions["m"].message
    assert decisions["m"].parameters == PARAMETERS


def test_it_answers_every_observation_and_ends_with_its_input():
    sink = io.BytesIO()
    serve(io.BytesIO(frame(SETUP) + frame(observed(1.0)) + frame(SETUP) + frame(observed(2.0)) + b"\x01"), sink)
    assert [list(each.models) for each in decisions_in(sink.getvalue())] == [["m"], ["m"]]


def test_decisions_name_the_setup_that_they_were_made_under():
    again, sink = Setup(SETUP.policy, 2), io.BytesIO()
    data = [frame(message) for message in (SETUP, observed(1.0), observed(2.0), again, observed(3.0))]
    serve(io.BytesIO(b"".join(data)), sink)
    assert [each.generation for each in decisions_in(sink.getvalue())] == [1, 1, 2]


def test_observations_before_the_policy_are_not_answered():
    sink = io.BytesIO()
    serve(io.BytesIO(frame(observed(1.0))), sink)
    assert sink.getvalue() == b""


def test_the_process_is_nothing_but_that():
    data = frame(SETUP) + frame(observed(1.0))
    done = subprocess.run(COMMAND, input=data, capture_output=True, timeout=60, check=True)  # noqa: S603 - our own command
    assert [list(each.models) for each in decisions_in(done.stdout)] == [["m"]]
    assert done.stderr == b""
