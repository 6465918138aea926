from __future__ import annotations

import msgspec
import pytest

from carpool.exchange.change import Change, Ticket, encode, read_change
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.policy.plain import PolicyError, from_plain
from carpool_cli.planning.assumptions import for_p99

CHANGE = Change(
    target="default/Deployment/resnet",
    generation=1_790_000_000_000,
    expires=1.79e9,
    policy=for_p99(0.05),
    parameters={"*": Parameters(max_batch=8, max_wait=Duration(0.002))},
)
TICKET = Ticket(target="default/Deployment/resnet", expires=1.79e9)


def test_what_is_written_is_read_again():
    assert read_change(msgspec.json.decode(encode(CHANGE))) == CHANGE
    assert from_plain(msgspec.json.decode(encode(TICKET)), Ticket, what="ticket") == TICKET


def test_equal_documents_are_equal_bytes():
    assert encode(CHANGE) == encode(read_change(msgspec.json.decode(encode(CHANGE))))


def test_one_signature_does_not_make_the_other():
    with pytest.raises(PolicyError, match="unknown field"):
        from_plain(msgspec.json.decode(encode(CHANGE)), Ticket, what="ticket")
    with pytest.raises(PolicyError, match="missing required field"):
        read_change(msgspec.json.decode(encode(TICKET)))


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("generation", 0, "generation: "),
        ("parameters", {}, "parameters: name those of a model"),
        ("policy", {"slo": {"latency": {}}}, r"policy\.slo\.latency: name at least one"),
        ("policy", {"slo": {"latency": {"p99": "50"}}}, r"policy\.slo\.latency\.p99"),
        ("signature", "x", "unknown field"),
    ],
)
def test_what_is_wrong_is_named(field, value, says):
    plain = msgspec.json.decode(encode(CHANGE)) | {field: value}
    with pytest.raises(PolicyError, match=says):
        read_change(plain)
