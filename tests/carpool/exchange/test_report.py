from __future__ import annotations

import msgspec
import pytest

from carpool.batching.counters import ModelStats, Stats
from carpool.exchange.report import Alone, Lane, ModelEntry, Queue, Report, RolledBack, Stalls, decode, encode
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.policy.plain import PolicyError

NOW, BEFORE = Parameters(max_batch=4, max_wait=Duration(0.001)), Parameters(max_batch=8)
REPORT = Report(
    stats=Stats(12.5, 1.0, {"m": ModelStats(arrivals=3, misses={"late": 1}, cells=[(0, 2, 1, 0, 5, 0.1, 0.01)])}),
    uptime_seconds=10.0,
    ready=True,
    readiness="ready",
    target="default/Deployment/resnet",
    generation=7,
    running=6,
    rolled_back=[
        RolledBack(
            model="m", generation=7, rejected=BEFORE, back_to=NOW, back_to_generation=6, reason="it missed", at=1.79e9
        )
    ],
    change_error="it has expired",
    rejected={"expired": 1},
    slo_seconds=0.05,
    queue=Queue(rows=1, bytes=10, in_flight=1, slots=2),
    lanes={
        "m": Lane(
            parameters=NOW,
            pass_through=False,
            queued_requests=1,
            cap=4,
            quarantined=False,
            service_seconds=(0.0, 0.005),
            executors=1,
            arrivals=[(12.0, 1)],
        )
    },
    models=[ModelEntry(name="m", version="1", lane="m", merges=True, max_batch=None, axis="first")],
    alone=[Alone("m", "axis-none", 2)],
    stalls=Stalls(1, 0.1),
)


def test_what_is_written_is_read_again():
    assert decode(encode(REPORT)) == REPORT


def test_the_wire_is_camel_case_with_units():
    plain = msgspec.json.decode(encode(REPORT))
    assert plain["uptimeSeconds"] == 10.0
    assert plain["rolledBack"][0]["backToGeneration"] == 6
    assert plain["lanes"]["m"]["parameters"]["maxWait"] == "1ms"


def test_what_an_older_sidecar_does_not_count_is_all():
    plain = msgspec.json.decode(encode(REPORT))
    del plain["stats"]["models"]["m"]["batchable"]
    model = decode(msgspec.json.encode(plain)).stats.models["m"]
    assert model.batchable == model.arrivals == 3


def test_what_a_newer_sidecar_adds_is_passed_over():
    plain = msgspec.json.decode(encode(REPORT))
    plain["weather"] = {"rain": True}
    plain["stats"]["models"]["m"]["drops"] = 3
    plain["lanes"]["m"]["colour"] = "blue"
    plain["lanes"]["m"]["parameters"]["maxRows"] = 5
    plain["rolledBack"][0]["rejected"]["maxRows"] = 5
    assert decode(msgspec.json.encode(plain)) == REPORT


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"ok", "not JSON"),
        (b"[" * 2000, "not JSON"),
        (b'{"readiness":"\xff"}', "not JSON"),
        (encode(REPORT).replace(b'"rows":', b'"rows":' + b"9" * 25, 1), "not JSON"),
        (b"[]", "report: "),
        (b"{}", "missing required field"),
        (encode(REPORT).replace(b'"ready":true', b'"ready":"yes"'), "ready: "),
    ],
)
def test_what_is_no_report_says_so(body, says):
    with pytest.raises(PolicyError, match=says):
        decode(body)
