from __future__ import annotations

from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.batching.counters import (
    CANCELLED,
    DURATION_BOUNDS,
    FAILED,
    LATE,
    MAX_KINDS,
    REJECTED,
    ROW_BOUNDS,
    Counters,
    ModelStats,
    Stats,
    combine,
)

events = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "answer", "fail", "refuse", "sample", "cold"]),
        st.integers(1, 4),
        st.floats(0.0, 0.3).map(lambda gap: round(gap, 4)),
    ),
    max_size=30,
)


def play(counters: Counters, happened: list[tuple[str, int, float]], now: float = 0.0) -> float:
    for what, rows, gap in happened:
        now += gap
        match what:
            case "arrive":
                counters.arrived(now, rows, rows % 2 == 0)
            case "answer":
                counters.answered(now - gap, now - gap + 0.1, now, ok=True)
            case "fail":
                counters.answered(now - gap, now - gap + 0.1, now, ok=False)
            case "refuse":
                counters.missed(f"reason-{rows}")
            case "sample":
                counters.cells_of(0, rows, 1)[0].add(gap)
            case "cold":
                counters.cold += 1
    return now


def same(one: ModelStats, other: ModelStats) -> bool:
    exact = (
        "arrivals", "batchable", "arrivals_squared", "windows", "rows", "served", "hits", "misses", "cold", "stalled",
        "durations",
    )  # fmt: skip
    assert {name: getattr(one, name) for name in exact} == {name: getattr(other, name) for name in exact}
    assert one.gaps_squared == pytest.approx(other.gaps_squared)
    none = [0] * (len(ROW_BOUNDS) + 1)
    assert (one.request_rows or none) == (other.request_rows or none)
    samples, others = sorted(one.samples()), sorted(other.samples())
    assert [sample[:4] for sample in samples] == [sample[:4] for sample in others]
    return all(
        sample.batches == also.batches
        and isclose(sample.busy, also.busy, abs_tol=1e-9)
        and isclose(sample.busy_squared, also.busy_squared, abs_tol=1e-9)
        for sample, also in zip(samples, others, strict=True)
    )


@given(events, events)
def test_differences_add_up(first: list[tuple[str, int, float]], second: list[tuple[str, int, float]]) -> None:
    counters = Counters()
    zero = Stats(0.0, models={"m": counters.snapshot(0.0)})
    now = play(counters, first)
    one = Stats(now, models={"m": counters.snapshot(now)})
    now = play(counters, second, now)
    two = Stats(now, models={"m": counters.snapshot(now)})
    parts = [two.since(one).models["m"], one.since(zero).models["m"]]
    assert same(combine(parts), two.since(zero).models["m"])
    assert same(combine([]), two.since(two).models["m"])


@given(events, events)
def test_replicas_add_up_in_any_order(
    first: list[tuple[str, int, float]], second: list[tuple[str, int, float]]
) -> None:
    parts = []
    for happened in (first, second):
        counters = Counters()
        parts.append(counters.snapshot(play(counters, happened)))
    total = combine(parts)
    assert same(total, combine(parts[::-1]))
    assert total.arrivals == sum(part.arrivals for part in parts)
    assert sum(total.durations) == total.served
    assert total.hits + total.misses.get(LATE, 0) == total.served


@pytest.mark.parametrize("counted_since", [2, 5, 9])
def test_after_a_reset_all_since_it_counts(counted_since: int) -> None:
    before, after = Counters(), Counters()
    for number in range(5):
        before.arrived(number, 1)
        before.answered(number, number + 1, number, ok=True)
    for number in range(counted_since):
        after.arrived(number, 1)  # may overtake the arrivals of before, but has answered nobody
    earlier = Stats(5.0, 4.0, {"m": before.snapshot(5.0)})
    later = Stats(6.0, 1.0, {"m": after.snapshot(6.0)}).since(earlier)
    assert later.models["m"].arrivals == counted_since
    assert later.models["m"].hits == 0
    assert later.device_busy == 1.0


def test_a_model_new_since_then_counts_whole() -> None:
    counters = Counters()
    counters.arrived(0.0, 3)
    stats = Stats(1.0, models={"m": counters.snapshot(1.0)})
    assert stats.since(Stats(0.0)).models == stats.models


def test_a_snapshot_does_not_change_with_the_counters() -> None:
    counters = Counters()
    counters.cells_of(0, 1, 1)[0].add(0.1)
    counters.missed(LATE)
    taken = counters.snapshot(0.0)
    counters.cells_of(0, 1, 1)[0].add(0.1)
    counters.missed(LATE)
    counters.answered(0.0, 1.0, 0.5, ok=True)
    assert taken.samples() == [(0, 1, 1, 0, 1, 0.1, 0.1 * 0.1)]
    assert taken.misses == {LATE: 1}
    assert sum(taken.durations) == 0


def test_windows_of_100_ms_are_squared_when_they_end_empty_ones_too() -> None:
    counters = Counters()
    for now in (0.01, 0.05, 0.09, 0.15, 0.45):  # 3, 1, 0, 0 and 1 under way
        counters.arrived(now, 1)
    taken = counters.snapshot(0.49)
    assert (taken.arrivals_squared, taken.windows) == (9 + 1, 4)
    taken = counters.snapshot(0.61)
    assert (taken.arrivals_squared, taken.windows, taken.arrivals) == (11, 6, 5)


def test_gaps_between_arrivals_are_squared_but_for_long_pauses() -> None:
    counters = Counters()
    for now in (100.0, 100.5, 100.5, 103.5, 5000.0):
        counters.arrived(now, 1)
    assert counters.snapshot(6000.0).gaps_squared == 0.25 + 9


def test_arrivals_are_counted_by_their_rows() -> None:
    counters = Counters()
    for rows in (1, 1, 2, 3, 4, 5, 8, 9, 2**15, 2**15 + 1, 10**9):
        counters.arrived(0.0, rows)
    assert counters.snapshot(0.0).request_rows == [2, 1, 2, 2, 1, *[0] * 10, 1, 2]


def test_rows_per_request_of_older_sidecars_are_unknown() -> None:
    counters = Counters()
    older = Stats(0.0, models={"m": ModelStats(arrivals=0, durations=[0] * 66)})
    counters.arrived(0.0, 1)
    counted = Stats(1.0, models={"m": counters.snapshot(1.0)})
    assert counted.since(older).models["m"].request_rows == []
    assert combine([counted.models["m"], older.models["m"]]).request_rows == [1, *[0] * 16]


def test_recent_arrivals_are_kept_for_replay() -> None:
    counters = Counters()
    for number in range(5000):
        counters.arrived(number * 1.0, 2)
    assert len(counters.recent) == 4096
    assert counters.recent[-1] == (4999.0, 2)
    assert (counters.arrivals, counters.rows) == (5000, 10_000)


@pytest.mark.parametrize(
    ("ok", "now", "hits", "misses"),
    [(True, 1.0, 1, {}), (True, 1.01, 0, {LATE: 1}), (False, 0.5, 0, {FAILED: 1}), (False, 2.0, 0, {FAILED: 1})],
)
def test_a_hit_is_a_good_answer_by_its_due_time(ok: bool, now: float, hits: int, misses: dict[str, int]) -> None:
    counters = Counters()
    counters.answered(0.0, 1.0, now, ok=ok)
    assert (counters.hits, counters.misses, counters.served) == (hits, misses, ok)


def test_who_leaves_has_not_missed_the_slo() -> None:
    assert ModelStats(misses={CANCELLED: 3, LATE: 2, "queue-full": 1}).missed == 3


def test_who_asks_what_the_model_rejects_has_not_missed_the_slo() -> None:
    counters = Counters()
    counters.answered(0.0, 1.0, 2.0, ok=False, failure=REJECTED)
    counted = counters.snapshot(2.0)
    assert (counted.misses, counted.missed, counted.served) == ({REJECTED: 1}, 0, 0)


def test_a_model_that_refuses_at_once_is_not_fast() -> None:
    counters = Counters()
    for _ in range(99):
        counters.answered(0.0, 1.0, 0.002, ok=False)
    assert counters.snapshot(1.0).quantile(0.99) is None
    counters.answered(0.0, 1.0, 0.5, ok=True)
    assert counters.snapshot(1.0).quantile(0.01) == pytest.approx(0.5, rel=0.19)


@given(st.lists(st.floats(0.0006, 30.0), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_a_quantile_is_right_to_a_bucket(durations: list[float], q: float) -> None:
    counters = Counters()
    for duration in durations:
        counters.answered(0.0, 1.0, duration, ok=True)
    found = counters.snapshot(0.0).quantile(q)
    assert found is not None
    exact = sorted(durations)[max(0, -int(-q * len(durations) // 1) - 1)]
    assert exact / 1.19 <= found <= exact * 1.19


def test_quantiles_of_nothing_and_of_the_endless() -> None:
    counters = Counters()
    assert counters.snapshot(0.0).quantile(0.5) is None
    counters.answered(0.0, 1.0, 1000.0, ok=True)
    assert counters.snapshot(0.0).quantile(0.5) == DURATION_BOUNDS[-1]


def test_kinds_of_batches_are_bounded_and_those_known_still_counted():
    counters = Counters()
    for rows in range(1, MAX_KINDS + 10):
        for cell in counters.cells_of(0, rows, 1)[:1]:
            cell.add(0.5)
    counters.cells_of(0, 1, 1)[0].add(0.5)
    samples = counters.snapshot(0.0).samples()
    assert len(samples) == MAX_KINDS
    assert samples[0] == (0, 1, 1, 0, 2, 1.0, 0.5)


def test_lateness_that_a_cold_batch_explains_is_counted_apart() -> None:
    counters = Counters()
    counters.exceeded(0.2, 1.0)
    counters.answered(0.8, 0.9, 1.0, ok=True)  # 0.1 s late, behind 0.2 s too many
    counters.answered(0.5, 0.7, 1.0, ok=True)  # 0.3 s late
    counters.refused("predicted-late", 1.1)
    counters.refused("queue-full", 1.1)
    counters.answered(3.0, 3.1, 3.2, ok=True)  # ten times as long after it
    assert counters.misses == {"cold": 2, "late": 2, "queue-full": 1}
    assert counters.snapshot(4.0).missed == 5, "a miss all the same"
