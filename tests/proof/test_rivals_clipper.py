from __future__ import annotations

from random import Random

import pytest
from proof.rivals import clipper
from proof.rivals.clipper import Aimd, Code, Paper, Quantile, quantile_line, size_line
from rivalry import batches, come, known, refusals, service, sizes


def test_aimd_makes_a_saw_tooth():
    size = Aimd(0.025, 36, 64)  # 40 rows take 25 ms, 41 too long
    seen = []
    for _ in range(12):
        seen.append(size.rows)
        size.sample(size.rows, service(size.rows))
    assert seen == [36, 37, 38, 39, 40, 41, 36, 37, 38, 39, 40, 41]


def test_aimd_grows_by_full_batches_only_and_never_beyond_its_ends():
    size = Aimd(0.025, 4, 5)
    size.sample(3, 0.001)
    assert size.rows == 4
    for _ in range(3):
        size.sample(5, 0.001)
    assert size.rows == 5
    for _ in range(9):
        size.sample(1, 1.0)
    assert size.rows == 1


def test_quantile_regression_of_a_line_is_the_line():
    samples = [(rows, service(rows)) for rows in (1, 2, 4, 8, 16, 32)]
    assert quantile_line(samples, 0.99) == (pytest.approx(0.0005, rel=1e-3), pytest.approx(0.005, rel=1e-2))


def test_quantile_regression_looks_at_the_slow_ones():
    # Of each size a hundred, two of them slow by 3 ms: the 99th is.
    samples = [(rows, service(rows) + 0.003 * (number < 2)) for rows in (1, 8, 32) for number in range(100)]
    slope, fixed = quantile_line(samples, 0.99)
    assert slope == pytest.approx(0.0005, rel=1e-2)
    assert fixed == pytest.approx(0.008, rel=1e-2)
    assert quantile_line(samples, 0.5)[1] == pytest.approx(0.005, rel=1e-2)


def test_one_size_has_no_slope():
    assert quantile_line([(4, 0.007)] * 3, 0.99) == (0.0, 0.007)


def test_quantile_finds_the_size_that_meets_the_objective():
    size = Quantile(0.025, 1, 64)
    seen = []
    for _ in range(12):
        for number in range(clipper.REFIT):
            rows = max(1, size.rows - number % 4)
            size.sample(rows, service(rows))
        seen.append(size.rows)
    # Up to twice what was tried; then 5 + 0.5 b <= 25.
    assert seen[:5] == [2, 4, 8, 16, 32]
    assert seen[-1] in {39, 40}


def test_quantile_goes_down_to_one():
    size = Quantile(0.004, 8, 64)
    for number in range(clipper.REFIT):
        size.sample(1 + number % 8, service(1 + number % 8))
    assert size.rows == 1


def test_the_papers_batch_is_delayed_unless_full():
    batcher = Paper(slots=1, max_batch=64, slo=0.05, size=Aimd(0.025, 3, 64), delay=0.005)
    assert sizes(come(batcher, [0.0, 0.001])) == []
    assert batcher.wake_at() == 0.005
    (first,) = batches(come(batcher, [0.002]))
    assert first.rows == 3
    come(batcher, [0.003, 0.004])
    # A full batch within the objective: one row more. Requests that came 50 ms ago are late.
    actions = batcher.complete(first, 0.0203)
    assert batcher.size.rows == 4
    (second,) = batches(actions)
    come(batcher, [0.021, 0.022])
    assert refusals(batcher.complete(second, 0.0715)) == ["predicted-late"]


def test_everybody_may_be_late_for_the_paper_and_for_the_code():
    for batcher in (
        Paper(slots=1, max_batch=64, slo=0.05, size=Aimd(0.025, 1, 64), delay=0.0),
        Code(slots=1, slo=0.05, times=(0.0, 0.005), rng=Random(0)),
    ):
        (first,) = batches(come(batcher, [0.0]))
        come(batcher, [0.001, 0.002])
        actions = batcher.complete(first, 1.0)
        assert refusals(actions) == ["predicted-late"] * 2
        assert sizes(actions) == []


def test_sizes_are_regressed_on_their_p99():
    # Exact times: b = 2000 t - 10. With a standard deviation of 1 ms all p99 are 3 ms later.
    exact = {rows: [service(rows)] * 5 for rows in (1, 8, 64)}
    assert size_line(exact) == (pytest.approx(2000), pytest.approx(-10))
    noisy = {rows: [service(rows) + each for each in (-0.001, -0.001, 0.0, 0.001, 0.001)] for rows in (1, 8, 64)}
    slope, fixed = size_line(noisy)
    assert slope == pytest.approx(2000)
    assert fixed == pytest.approx(-16)


def test_sizes_without_samples_or_of_one_kind():
    assert size_line({}) == (0.0, 1.0)
    assert size_line({3: [0.01, 0.01]}) == (0.0, 3.0)


def code(**options):
    return Code(
        **{"slots": 1, "slo": 0.05, "times": tuple(service(rows) for rows in range(65)), "rng": Random(0)} | options
    )


def test_the_code_sends_what_the_first_has_time_for():
    container = code()
    (first,) = batches(come(container, [0.0]))
    come(container, [0.001] * 60)
    # At 30.4 ms the first has 20.6 ms left. 0.92 of that is 18.95 ms: 2000 * 0.01895 - 10 = 27.9 rows.
    assert sizes(container.complete(first, 0.0304)) == [27]


def test_the_code_explores_while_no_batch_has_taken_so_long():
    # Nothing fits into the SLO, so nothing is known; what is measured then is quick.
    container = code(times=(1.0,) * 21)
    seen = []
    for number in range(15):
        sent = batches(come(container, [float(number)] * 10))
        while sent:
            (batch,) = sent
            seen.append(batch.rows)
            sent = batches(container.complete(batch, number + 0.001))
    # Five samples of a size, and then one row more.
    grown = [largest for largest in (1, 2, 3, 4) if largest in seen]
    assert grown == [1, 2, 3, 4]
    assert [seen.index(size) for size in grown] == sorted(seen.index(size) for size in grown)
    assert seen[: seen.index(3)].count(2) >= clipper.ENOUGH


def test_contenders_begin_with_what_a_person_could_know():
    knowledge = known(executors=2)
    for maker in (clipper.aimd, clipper.quantile):
        batcher = maker(knowledge, Random(0)).dispatcher()
        assert batcher.size.rows == 40
        assert batcher.slots == 2
    assert clipper.code(knowledge, Random(0)).dispatcher().slots == 2
