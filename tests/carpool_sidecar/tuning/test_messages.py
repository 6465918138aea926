from __future__ import annotations

from math import inf

from carpool.batching.counters import ModelStats
from carpool.batching.requests import Estimate
from carpool.exchange.decision import Decision, Forecasted, Observation, Reason
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.policy.plain import to_plain
from carpool_cli.planning.assumptions import for_p99
from carpool_sidecar.frames import LENGTH
from carpool_sidecar.tuning.messages import (
    Answered,
    Decided,
    Observations,
    Observed,
    Setup,
    frame,
    read_message,
    read_reply,
)

PARAMETERS = Parameters(max_batch=4, max_wait=Duration(0.00125), max_in_flight=2)


def test_messages_arrive_as_they_were_sent():
    stats = ModelStats(arrivals=3, misses={"late": 1})
    observations = Observations({"m": Observed(Observation(now=1.5, seconds=1.0, stats=stats), PARAMETERS, 3)})
    for message in (Setup(to_plain(for_p99(0.05))), observations):
        sent = frame(message)
        assert int.from_bytes(sent[:LENGTH], "little") == len(sent) - LENGTH
        assert read_message(sent[LENGTH:]) == message
    assert isinstance(read_message(frame(observations)[LENGTH:]).models["m"].parameters.max_wait, Duration)


def test_decisions_arrive_with_infinite_forecasts():
    forecast = Forecasted(
        p50=0.1, p99=inf, p99_ahead=inf, miss_fraction=1.0, goodput=0.0, device_time=0.01, mean_batch=4.0
    )
    decision = Decision(
        parameters=PARAMETERS,
        change=True,
        reason=Reason.MORE_GOODPUT,
        message="so",
        predicted=forecast,
        estimate=Estimate(times=(0.0, 0.1), upper=(0.0, 0.2), executors=2),
    )
    for reply in (Decided("m", decision, 3), Answered()):
        assert read_reply(frame(reply)[LENGTH:]) == reply
