from __future__ import annotations

from typing import Annotated, Literal

import pytest
from msgspec import Meta, Struct, field

from carpool.policy.plain import PolicyError, from_plain
from carpool.policy.schema import alternatives
from carpool.policy.spec import Axis, BatchingPolicy, TuningMode


class Inner(Struct, rename="camel"):
    log_level: Literal["Debug", "Info"] = "Info"
    count: int = 0


class Outer(Struct):
    one: Annotated[Inner | None, Meta(description="x")] = None
    many: tuple[Inner, ...] = ()
    named: dict[str, Inner] = field(default_factory=dict)
    axis: Axis = Axis.AUTO


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("", ["one", "many", "named", "axis"]),
        ("one", ["logLevel", "count"]),
        ("one.logLevel", ["Debug", "Info"]),
        ("many[3].logLevel", ["Debug", "Info"]),
        ("named[...].logLevel", ["Debug", "Info"]),
        ("axis", ["Auto", "First", "None"]),
        ("one.count", []),
        ("one.count.further", []),
    ],
)
def test_what_is_taken_is_found_by_its_path(path, found):
    assert alternatives(Outer, path) == found


def test_errors_name_what_a_field_takes():
    slo = {"latency": {"p99": "50ms"}}
    with pytest.raises(PolicyError) as raised:
        from_plain({"slo": slo, "tuning": {"mode": "apply"}}, BatchingPolicy, what="policy")
    assert raised.value.field == "tuning.mode"
    assert all(mode in str(raised.value) for mode in TuningMode)
    with pytest.raises(PolicyError, match=r"unknown field `bouns`.*bounds"):
        from_plain({"slo": slo, "bouns": {}}, BatchingPolicy, what="policy")
