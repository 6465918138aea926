from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from carpool.policy.durations import Duration, Quantity, format_seconds, whole_microseconds
from carpool.policy.generation import Order, Tenants
from carpool.policy.parameters import Parameters
from carpool.policy.plain import PolicyError, from_plain, to_plain
from carpool.policy.spec import (
    SLO,
    Admission,
    Axis,
    BatchingPolicy,
    Bounds,
    DurationRange,
    Fallback,
    IntRange,
    Latency,
    Model,
    PassThrough,
    SequenceAxis,
    Tuning,
)
from carpool_cli.planning.assumptions import for_p99

SPEC = {
    "slo": {"latency": {"p99": "50ms"}},
    "models": [{"name": "resnet", "axis": "Auto"}],
    "bounds": {
        "maxBatch": {"min": 1, "max": 64},
        "maxWait": {"min": "0s", "max": "20ms"},
        "maxInFlight": {"min": 1, "max": 4},
    },
    "baseline": {"maxBatch": 8, "maxWait": "2ms", "maxInFlight": 2},
    "tuning": {
        "mode": "Apply",
        "tolerancePercent": 10,
        "riskier": {"after": "10s", "minRequests": 300, "maxFactor": 2},
    },
    "passThrough": {"mode": "Automatic"},
    "admission": {"maxQueuedRows": 1024, "maxQueuedBytes": "256Mi", "timeout": "10s", "shedAt": "Automatic"},
    "fallback": {"failureThreshold": 3, "behavior": "HoldLast"},
}


def policy(**spec: Any) -> BatchingPolicy:
    return from_plain({"slo": {"latency": {"p99": "50ms"}}, **spec}, BatchingPolicy, what="policy")


def test_headers_that_say_how_a_body_is_read_cannot_differ_in_a_batch() -> None:
    assert policy(batchAcross=["authorization", "x-tenant"]).validate().batch_across == ("authorization", "x-tenant")
    with pytest.raises(PolicyError, match=r"batchAcross\[1\]: content-type says how a body is to be read"):
        policy(batchAcross=["authorization", "content-type"]).validate()
    for name in ("Authorization", "a b", "", "a" * 129, "a:"):
        with pytest.raises(PolicyError, match=r"batchAcross\[...\]|batchAcross\[0\]"):
            policy(batchAcross=[name])


# ------------------------------------------------------------------------------------------------- durations and sizes


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0s", 0.0), ("50ms", 0.05), ("2s", 2.0), ("1m30s", 90.0), ("1h", 3600.0), ("1s50ms", 1.05), ("250us", 0.00025)],
)
def test_durations_are_read_exactly(text: str, seconds: float) -> None:
    assert Duration.parse(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "5", "ms", "5 ms", "-5ms", "1.5s", "5msx", "50MS", "123456s", "1h1h1h1h1h1h", "5d"]
)
def test_what_is_no_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="50ms"):
        Duration.parse(text)


@given(st.integers(0, 99_999 * 3_600_000_000))
def test_durations_of_whole_microseconds_round_trip(micros: int) -> None:
    written = str(Duration(micros / 1e6))
    assert Duration.parse(written) == micros / 1e6


@pytest.mark.parametrize(
    ("text", "count"), [("0", 0), ("1000", 1000), ("4k", 4000), ("1Ki", 1024), ("256Mi", 256 * 2**20), ("1T", 10**12)]
)
def test_sizes_are_read(text: str, count: int) -> None:
    assert Quantity.parse(text) == count


@pytest.mark.parametrize("text", ["", "Mi", "1.5Gi", "-1", "1KB", "1 Mi", "1e9"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="256Mi"):
        Quantity.parse(text)


@given(st.integers(0, 10**15 - 1))
def test_sizes_round_trip(count: int) -> None:
    assert Quantity.parse(str(Quantity(count))) == count


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0s"),
        (0.002, "2ms"),
        (0.00125, "1.25ms"),
        (0.00035, "350us"),
        (12.0, "12s"),
        (0.9999, "0.9999s"),
        (1e-9, "0.001us"),
    ],
)
def test_people_read_seconds_in_their_unit(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_waits_are_whole_microseconds() -> None:
    assert whole_microseconds(0.0012345678) == 0.001235


# ------------------------------------------------------------------------------------------------- reading and writing


def test_the_published_example_is_read_whole() -> None:
    read = from_plain(SPEC, BatchingPolicy, what="policy").validate()
    assert read.slo.due == 0.05
    assert read.baseline == Parameters(max_batch=8, max_wait=Duration(0.002), max_in_flight=2)
    assert read.admission.max_queued_bytes == 256 * 2**20
    assert read.models == (Model(name="resnet"),)


def test_defaults_are_the_published_example_s() -> None:
    read = from_plain(SPEC, BatchingPolicy, what="policy")
    bare = for_p99(0.05)
    for name in ("tuning", "pass_through", "fallback"):
        assert getattr(read, name) == getattr(bare, name)
    assert read.admission == replace(bare.admission, timeout=Duration(bare.admission.seconds(0.05)))


@pytest.mark.parametrize(
    ("target", "timeout", "seconds"), [("50ms", None, 10), ("30s", None, 60), ("50ms", "2s", 2), ("30s", "40s", 40)]
)
def test_a_deadline_that_nobody_names_leaves_time_for_the_slo(target, timeout, seconds):
    named = {} if timeout is None else {"admission": {"timeout": timeout}}
    policy = from_plain({"slo": {"latency": {"p99": target}}, **named}, BatchingPolicy, what="policy").validate()
    assert policy.admission.seconds(policy.slo.due) == seconds


durations = st.integers(0, 10**9).map(lambda micros: Duration(micros / 1e6))
optional_durations = st.none() | durations
ranges = st.builds(IntRange, min=st.none() | st.integers(1, 99), max=st.none() | st.integers(1, 99))
bounds = st.builds(
    Bounds,
    max_batch=ranges,
    max_wait=st.builds(DurationRange, min=optional_durations, max=optional_durations),
    max_in_flight=ranges,
)
policies = st.builds(
    BatchingPolicy,
    slo=st.builds(SLO, latency=st.builds(Latency, p50=optional_durations, p99=durations, p999=optional_durations)),
    models=st.lists(
        st.builds(
            Model,
            name=st.text(min_size=1, max_size=9),
            axis=st.sampled_from(Axis),
            max_batch=st.none() | st.integers(1, 9),
            sequence=st.none()
            | st.builds(SequenceAxis, pad=st.dictionaries(st.text(), st.floats(-9, 9), min_size=1, max_size=3)),
            bounds=st.none() | bounds,
        ),
        max_size=2,
    ).map(tuple),
    bounds=bounds,
    baseline=st.builds(
        Parameters,
        max_batch=st.integers(1, 99),
        max_wait=durations,
        max_in_flight=st.integers(1, 9),
        pass_through=st.booleans(),
    ),
    tuning=st.builds(Tuning, tolerance_percent=st.integers(0, 100)),
    pass_through=st.builds(PassThrough),
    admission=st.builds(
        Admission,
        max_queued_bytes=st.integers(0, 10**15 - 1).map(Quantity),
        max_queued_tokens=st.none() | st.integers(1),
        timeout=durations,
    ),
    fallback=st.builds(Fallback),
)


@given(policies)
def test_what_is_written_is_read_back_equal(value: BatchingPolicy) -> None:
    written = msgspec.json.encode(to_plain(value), enc_hook=None)  # nothing but JSON's own types
    assert from_plain(msgspec.json.decode(written), BatchingPolicy, what="policy") == value


def test_names_are_camel_case_and_values_readable() -> None:
    assert to_plain(Parameters(max_batch=4, max_wait=Duration(0.002))) == {
        "maxBatch": 4,
        "maxWait": "2ms",
        "maxInFlight": 1,
        "passThrough": False,
    }
    assert to_plain(Admission(max_queued_bytes=Quantity(2**30))) == {"maxQueuedBytes": "1Gi"}


@pytest.mark.parametrize(
    ("spec", "field", "says"),
    [
        ({"slo": {"latency": {"p98": "1s"}}}, "slo.latency", "p98"),
        ({"max_batch": 3}, "policy", "max_batch"),
        ({"baseline": {"maxBatch": 0}}, "baseline.maxBatch", ">= 1"),
        ({"baseline": {"maxBatch": "8"}}, "baseline.maxBatch", "int"),
        ({"baseline": {"maxBatch": True}}, "baseline.maxBatch", "int"),
        ({"baseline": {"maxWait": 5}}, "baseline.maxWait", "with its unit"),
        ({"baseline": {"maxWait": "5"}}, "baseline.maxWait", "50ms"),
        ({"baseline": {"maxWait": False}}, "baseline.maxWait", "with its unit"),
        ({"admission": {"maxQueuedBytes": "lots"}}, "admission.maxQueuedBytes", "256Mi"),
        ({"admission": {"shedAt": "Never"}}, "admission.shedAt", "Never"),
        ({"models": [{"axis": "First"}]}, "models[0]", "name"),
        ({"models": [{"name": "m", "sequence": {}}]}, "models[0].sequence", "pad"),
        ({"models": [{"name": "m", "sequence": {"pad": {}}}]}, "models[0].sequence.pad", "length >= 1"),
        ({"models": [{"name": "m", "sequence": {"pad": {"x": "0"}}}]}, "models[0].sequence.pad[...]", "float"),
        ({"models": [{"name": "m", "sequence": {"pad": {"x": 0}, "axis": 0}}]}, "models[0].sequence.axis", ">= 1"),
        (
            {"models": [{"name": "m", "sequence": {"pad": {"x": 0}, "lengths": [0]}}]},
            "models[0].sequence.lengths[0]",
            ">= 1",
        ),
        ({"tuning": {"riskier": {"maxFactor": 1}}}, "tuning.riskier.maxFactor", "> 1"),
    ],
)
def test_what_cannot_be_read_names_its_field(spec: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(PolicyError, match=says) as caught:
        policy(**spec)
    assert caught.value.field == field


def test_a_policy_needs_an_slo() -> None:
    with pytest.raises(PolicyError, match="slo"):
        from_plain({}, BatchingPolicy, what="policy")


def test_zero_needs_no_unit_and_bytes_no_suffix() -> None:
    assert policy(bounds={"maxWait": {"min": 0}}).bounds.max_wait.min == 0.0
    assert policy(admission={"maxQueuedBytes": 5}).admission.max_queued_bytes == 5


# ------------------------------------------------------------------------------------------------- what types can't say


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"slo": {}}, "slo.latency"),
        ({"slo": {"latency": {}, "ttft": {"p99": "2s"}}}, "slo.latency"),
        ({"slo": {"tpot": {"p99": "50ms"}}}, "slo.ttft"),
        ({"slo": {"latency": {"p99": "1s"}, "tpot": {"p99": "50ms"}}}, "slo.ttft"),
        ({"slo": {"ttft": {"p99": "0s"}}}, "slo.ttft.p99"),
        ({"slo": {"ttft": {"p99": "2s"}, "tpot": {"p99": "0s"}}}, "slo.tpot.p99"),
        ({"slo": {"latency": {"p99": "1s"}, "classes": [{"priority": "a", "ttft": {"p99": "1s"}}]}}, "slo.ttft"),
        ({"slo": {"latency": {"p99": "1s"}}, "generation": {"maxRunning": 4}}, "slo.ttft"),
        ({"slo": {"ttft": {"p99": "2s"}, "classes": [{"priority": "a"}]}}, "slo.classes[0]"),
        (
            {"slo": {"ttft": {"p99": "2s"}, "classes": [{"priority": "batch", "ttft": {"p99": "1s"}}]}},
            "slo.classes[0].priority",
        ),
        (
            {"slo": {"ttft": {"p99": "2s"}, "classes": [{"priority": "a", "ttft": {"p99": "1s"}}] * 2}},
            "slo.classes[1].priority",
        ),
        (
            {"slo": {"ttft": {"p99": "2s"}, "classes": [{"priority": "a", "tpot": {"p99": "0s"}}]}},
            "slo.classes[0].tpot.p99",
        ),
        ({"slo": {"latency": {"p99": "0s"}}}, "slo.latency.p99"),
        ({"slo": {"latency": {"p999": "0s"}}}, "slo.latency.p999"),
        ({"slo": {"latency": {"p50": "60ms", "p99": "50ms"}}}, "slo.latency"),
        ({"bounds": {"maxBatch": {"min": 9, "max": 8}}}, "bounds.maxBatch"),
        ({"bounds": {"maxWait": {"min": "9ms", "max": "8ms"}}}, "bounds.maxWait"),
        ({"bounds": {"maxInFlight": {"min": 9, "max": 8}}}, "bounds.maxInFlight"),
        ({"bounds": {"maxWait": {"max": "50ms"}}}, "bounds.maxWait.max"),
        ({"bounds": {"maxWait": {"min": "50ms"}}}, "bounds.maxWait.min"),
        ({"baseline": {"maxBatch": 65}}, "baseline.maxBatch"),
        ({"baseline": {"maxWait": "26ms"}}, "baseline.maxWait"),
        ({"baseline": {"maxInFlight": 33}}, "baseline.maxInFlight"),
        ({"baseline": {"maxBatch": 9}, "bounds": {"maxBatch": {"max": 4}}}, "baseline.maxBatch"),
        ({"models": [{"name": "a"}, {"name": "a"}]}, "models[1].name"),
        ({"models": [{"name": "a", "bounds": {"maxBatch": {"min": 3, "max": 2}}}]}, "models[0].bounds.maxBatch"),
        ({"models": [{"name": "a", "bounds": {"maxWait": {"max": "1s"}}}]}, "models[0].bounds.maxWait.max"),
        (
            {"bounds": {"maxBatch": {"max": 8}}, "models": [{"name": "a", "bounds": {"maxBatch": {"min": 9}}}]},
            "models[0].bounds.maxBatch",
        ),
        ({"admission": {"timeout": "0s"}}, "admission.timeout"),
    ],
)
def test_a_contradiction_names_its_field(spec: dict[str, Any], field: str) -> None:
    with pytest.raises(PolicyError) as caught:
        policy(**spec).validate()
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


def test_the_slo_is_its_highest_percentile() -> None:
    assert policy(slo={"latency": {"p50": "10ms", "p999": "80ms"}}).validate().slo.due == 0.08


def test_token_streams_have_targets_of_their_own_and_need_no_latency() -> None:
    tokens = {"ttft": {"p99": "2s"}, "tpot": {"p99": "50ms"}}
    alone = policy(slo=tokens).validate()
    assert alone.slo.due == 2.0  # of requests that are no streams
    both = policy(slo={"latency": {"p99": "80ms"}, **tokens}).validate()
    assert (both.slo.due, both.slo.ttft, both.slo.tpot) == (0.08, alone.slo.ttft, alone.slo.tpot)
    assert to_plain(alone)["slo"] == {"ttft": {"p99": "2s"}, "tpot": {"p99": "50ms"}}


def test_the_gate_has_bounds() -> None:
    bounds = {"maxRunning": 64, "order": "ShortestPromptFirst", "tenants": {"header": "x-tenant", "weights": {"a": 2}}}
    read = policy(slo={"ttft": {"p99": "2s"}}, generation=bounds).validate().generation
    assert (read.max_running, read.order, read.kv_budget_percent) == (64, Order.SHORTEST_PROMPT_FIRST, 80)
    assert read.tenants == Tenants(header="x-tenant", weights={"a": 2.0})
    for wrong, field in (
        ({"order": "Random"}, "generation.order"),
        ({"maxRunning": 0}, "generation.maxRunning"),
        ({"kvBudgetPercent": 101}, "generation.kvBudgetPercent"),
        ({"tenants": {"header": "x tenant"}}, "generation.tenants.header"),
        ({"tenants": {"header": "x", "weights": {"a": 0}}}, "generation.tenants.weights[...]"),
    ):
        with pytest.raises(PolicyError) as caught:
            policy(generation=wrong)
        assert caught.value.field == field


def test_limits_default_to_64_rows_half_the_slo_and_32_in_flight() -> None:
    limits = for_p99(0.015).limits()
    assert (limits.min_batch, limits.max_batch) == (1, 64)
    assert (limits.min_wait, limits.max_wait) == (0.0, 0.0075)
    assert (limits.min_in_flight, limits.max_in_flight) == (1, 32)


def test_a_lower_bound_beyond_the_default_upper_one_moves_it() -> None:
    limits = policy(bounds={"maxBatch": {"min": 100}, "maxWait": {"min": "30ms"}, "maxInFlight": {"min": 33}}).limits()
    assert (limits.min_batch, limits.max_batch) == (100, 100)
    assert (limits.min_wait, limits.max_wait) == (0.03, 0.03)
    assert (limits.min_in_flight, limits.max_in_flight) == (33, 33)


def test_a_wait_outside_its_bounds_is_shown_with_units() -> None:
    with pytest.raises(PolicyError, match="30ms lies outside its bounds 0s to 25ms"):
        policy(baseline={"maxWait": "30ms"}).validate()


def test_a_baseline_nobody_wrote_moves_inside_the_bounds() -> None:
    tight = policy(bounds={"maxBatch": {"max": 4}, "maxInFlight": {"min": 2}}).validate()
    assert tight.limits().clamp(tight.baseline) == Parameters(max_batch=4, max_in_flight=2)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Model(name="a"), (2, 32)),
        (Model(name="a", bounds=Bounds(max_batch=IntRange(max=16))), (2, 16)),
        (Model(name="a", max_batch=8), (2, 8)),
        (Model(name="a", max_batch=1), (1, 1)),
        (Model(name="a", axis=Axis.NONE), (1, 1)),
    ],
)
def test_a_model_s_own_bounds_count_first_and_its_cap_always(model: Model, expected: tuple[int, int]) -> None:
    limits = policy(bounds={"maxBatch": {"min": 2, "max": 32}}).limits(model)
    assert (limits.min_batch, limits.max_batch) == expected


@given(bounds=bounds, parameters=st.builds(Parameters, max_batch=st.integers(1, 99), max_wait=durations))
def test_clamped_parameters_lie_inside_valid_limits(bounds: Bounds, parameters: Parameters) -> None:
    try:
        limits = msgspec.structs.replace(for_p99(1.0), bounds=bounds).validate().limits()
    except PolicyError:
        return
    clamped = limits.clamp(parameters)
    assert limits.min_batch <= clamped.max_batch <= limits.max_batch
    assert limits.min_wait <= clamped.max_wait <= limits.max_wait
    assert limits.min_in_flight <= clamped.max_in_flight <= limits.max_in_flight
    assert limits.clamp(clamped) == clamped


def test_parameters_describe_themselves() -> None:
    assert Parameters(max_batch=8, max_wait=Duration(0.002)).describe() == "batch 8, wait 2ms, 1 in flight"
    assert Parameters(pass_through=True, max_in_flight=4).describe() == "pass-through, 4 in flight"
