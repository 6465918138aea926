from __future__ import annotations

import copy
import math
from collections import Counter
from itertools import pairwise
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from service_times import affine, cells, device, noisy, sample

from carpool.batching.counters import Sample
from carpool.learning.latency_model import LatencyLearner, ServiceTime, fit
from carpool.learning.smoothing import isotonic, smoothed

# -- the curve


def test_between_measured_sizes_lies_a_straight_line():
    service = ServiceTime.measured({1: 1.0, 4: 4.0, 8: 4.0})
    assert [service.time(rows) for rows in range(9)] == pytest.approx([0, 1, 2, 3, 4, 4, 4, 4, 4])
    assert service.table(8) == tuple(service.time(rows) for rows in range(9))
    assert service.per_row(8) == 0.5


def test_beyond_the_largest_size_the_tail_goes_on_with_growing_doubt():
    service = ServiceTime.measured({rows: affine(rows) for rows in (1, 2, 4, 8, 16)})
    assert service.largest_measured == 16
    assert service.time(32) == pytest.approx(affine(32))
    doubts = [service.upper(rows) - service.lower(rows) for rows in (16, 17, 24, 32, 64)]
    assert doubts[0] == 0
    assert doubts == sorted(doubts)
    # Two batches of 16 are one way to serve 32: nothing is taken to cost more than that.
    assert service.upper(32) == pytest.approx(2 * service.time(16))


def test_a_superlinear_tail_is_extrapolated_as_steeply():
    service = ServiceTime.measured({rows: 0.001 * rows**1.5 for rows in (1, 2, 4, 8, 16)})
    assert service.time(32) > 2 * service.time(16)
    assert service.upper(32) >= service.time(32)
    assert service.per_row(32) > service.per_row(1)


def test_below_the_smallest_size_the_line_goes_on_inside_what_is_possible():
    service = ServiceTime.measured({4: 6.0, 8: 8.0})
    assert service.time(2) == pytest.approx(5.0)
    assert service.upper(1) == 6.0
    assert service.lower(1) == 1.5
    steep = ServiceTime.measured({4: 4.0, 8: 12.0})
    assert steep.time(1) == 1.0


def test_one_size_measured_leaves_the_slope_open():
    service = ServiceTime.measured({4: 0.008})
    assert service.lower(8) == pytest.approx(0.008)
    assert service.time(8) == pytest.approx(0.012)
    assert service.upper(8) == pytest.approx(0.016)


def test_scaled_and_pessimistic():
    service = fit([sample(1, [1.0, 1.1]), sample(4, [2.0, 2.1])])
    assert service.scaled(2.0).time(9) == pytest.approx(2 * service.time(9))
    assert service.scaled(2.0).upper(9) == pytest.approx(2 * service.upper(9))
    worst = service.pessimistic()
    assert [worst.time(rows) for rows in range(9)] == pytest.approx([service.upper(rows) for rows in range(9)])


def test_the_curve_travels_as_json():
    service = ServiceTime.measured({1: 0.005, 8: 0.009}, executors=2)
    assert msgspec.json.decode(msgspec.json.encode(service), type=ServiceTime).time(9) == service.time(9)


# -- the fit


@given(st.lists(st.tuples(st.floats(0.1, 100), st.floats(0.1, 10)), min_size=1, max_size=30))
def test_isotonic_is_monotone_and_keeps_the_weighted_mean(points):
    values, weights = [v for v, _ in points], [w for _, w in points]
    fitted, pooled = isotonic(values, weights)
    assert fitted == sorted(fitted)
    assert sum(f * w for f, w in zip(fitted, weights, strict=True)) == pytest.approx(sum(v * w for v, w in points))
    assert all(p >= w - 1e-9 for p, w in zip(pooled, weights, strict=True))
    if values == sorted(values):
        assert fitted == pytest.approx(values)


def test_isotonic_pools_violators_by_weight():
    assert isotonic([1.0, 4.0, 1.0, 5.0], [1, 1, 2, 1]) == ([1.0, 2.0, 2.0, 5.0], [1, 3, 3, 1])


def test_nothing_seen_is_nothing_known():
    assert fit([]) is None


def test_steps_are_kept():
    def step(rows):
        return 0.004 * math.ceil(rows / 8)

    service = fit([sample(rows, [step(rows)] * 20) for rows in range(1, 33)])
    assert service.table(32) == pytest.approx([step(rows) for rows in range(33)])
    assert service.per_row(8) < min(service.per_row(7), service.per_row(9))


def test_chance_is_taken_off_a_noisy_curve_and_steps_are_left_in_it():
    def step(rows):
        return 0.004 * math.ceil(rows / 16)

    for curve, cv in ((affine, 1.0), (step, 0.1)):
        rng = Random(4)
        samples = [sample(rows, [noisy(rng, curve(rows), cv) for _ in range(12)]) for rows in range(1, 49)]
        raw = math.fsum(abs(s.busy / s.batches / curve(s.rows) - 1) for s in samples)
        service = fit(samples)
        off = math.fsum(abs(service.time(rows) / curve(rows) - 1) for rows in range(1, 49))
        assert off < raw * (0.5 if curve is affine else 1.0)
        # The size with the fastest samples by chance is not taken: the cheapest row is where the curve has it.
        assert min(range(1, 49), key=service.per_row) >= 16


def test_a_local_minimum_with_few_samples_is_not_smoothed_away_by_well_measured_sizes():
    # Of an OCR model, rows cost least in fours. A line through 2 and 6 is 20 % above what a batch of four takes, ten
    # times what chance leaves open of six of them; that 1 and 2 lie on the line, which goes by them, says nothing.
    rows, times = (1, 2, 3, 4, 6, 8), (0.00069, 0.0013, 0.00191, 0.00252, 0.00474, 0.007)
    found = smoothed(rows, times, (3000, 600, 3, 6, 25, 6), 0.05)
    assert found == pytest.approx(times, rel=0.02)


def test_a_bend_seen_a_few_times_is_left_behind_sizes_seen_a_thousand_times():
    # Of a ranking tower, rows cost 0.66 ms up to eight and 0.22 ms from there on. Five batches of ten that vary by 5 %
    # leave 2 % open, a fifth of what the line through small sizes is off by; that those lie on it says nothing of ten.
    rows, times = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10), tuple(0.00128 + 0.00066 * b for b in range(1, 9))
    times = (*times, times[-1] + 0.00022, times[-1] + 0.00044)
    found = smoothed(rows, times, (900, 800, 700, 600, 500, 1000, 60, 100, 13, 5), 0.05)
    assert found == pytest.approx(times, rel=0.05)
    assert found[-1] < 0.5 * (times[-1] + times[7] + 2 * 0.00066), "nearer to what was seen than to the line"


def test_even_one_batch_leaves_doubt():
    service = fit([sample(1, [0.01])])
    assert service.time(1) == pytest.approx(0.01)
    assert service.upper(1) > 0.012
    assert service.lower(1) < 0.008
    assert service.samples == 1


def test_doubt_shrinks_with_samples():
    def width(count):
        rng = Random(1)
        service = fit([sample(4, [noisy(rng, 0.01, 0.3) for _ in range(count)])])
        return service.upper(4) - service.lower(4)

    assert width(1000) < width(100) < width(10) < width(2)
    # 2 * 1.96 * 0.3 * 10 ms / sqrt(1000)
    assert width(1000) == pytest.approx(0.000372, rel=0.15)


def test_the_interval_covers_the_mean():
    rng = Random(2)
    covered = 0
    for _ in range(300):
        service = fit([sample(4, [noisy(rng, 0.01, 0.3) for _ in range(6)])])
        covered += service.lower(4) <= 0.01 <= service.upper(4)
    assert covered >= 270


def test_noise_is_pooled_over_sizes():
    rng = Random(3)
    service = fit([sample(rows, [noisy(rng, affine(rows), 0.3) for _ in range(40)]) for rows in range(1, 33)])
    assert service.noise == pytest.approx(0.3, rel=0.1)
    for rows in (1, 8, 32):
        assert service.time(rows) == pytest.approx(affine(rows), rel=0.15)


def test_beyond_the_largest_size_a_curve_goes_on_as_it_does_behind_its_last_bend():
    # A ranking tower on one core: a row costs 0.66 ms up to eight, 0.22 ms from there on.
    def took(rows):
        return 0.00128 + 0.00066 * rows if rows <= 8 else 0.00656 + 0.00022 * (rows - 8)

    rng = Random(4)
    seen = [
        sample(rows, [took(rows) * rng.gauss(1, 0.05) for _ in range(200 if rows < 9 else 60)]) for rows in range(1, 13)
    ]
    curve = fit(seen)
    assert curve.time(16) == pytest.approx(took(16), rel=0.04)
    assert curve.time(24) == pytest.approx(took(24), rel=0.10)


def test_beyond_the_largest_size_two_octaves_of_sizes_extrapolate_a_straight_curve():
    rng = Random(4)
    sizes = range(1, 17)
    straight = fit([sample(rows, [(5 + rows) * rng.gauss(1, 0.3) for _ in range(20)]) for rows in sizes])
    narrow = fit([sample(rows, [(5 + rows) * rng.gauss(1, 0.3) for _ in range(20)]) for rows in range(12, 17)])
    assert straight.tail_slope == pytest.approx(1.0, abs=0.4)
    assert straight.tail_error < narrow.tail_error / 3


def test_sizes_more_than_two_octaves_below_the_largest_do_not_affect_the_extrapolation():
    line = {rows: 5.0 + rows for rows in range(4, 17)}
    known = ServiceTime.measured(line)
    for head in ({rows: 5.0 + rows for rows in (1, 2, 3)}, {3: 7.9}, {1: 1.0, 2: 1.0}):
        curve = ServiceTime.measured(head | line)
        assert curve.time(64) == pytest.approx(known.time(64))
        assert curve.lower(64) == pytest.approx(known.lower(64))
    # A size two octaves below the largest still counts.
    assert ServiceTime.measured({rows: 5.0 + rows for rows in range(5, 17)}).lower(64) < known.lower(64)
    # So do the two largest sizes, however far apart.
    assert ServiceTime.measured({1: 1.0, 16: 4.0}).time(31) == pytest.approx(7.0)


def test_beyond_the_largest_size_a_single_step_up_is_no_slope():
    # Of the 17th row alone every further one would take 4 ms, 32 of them 72 ms.
    def step(rows):
        return 0.004 * math.ceil(rows / 8)

    curve = ServiceTime.measured({rows: step(rows) for rows in range(1, 18)})
    assert curve.time(32) == pytest.approx(0.020, rel=0.1)


def test_beyond_the_largest_size_what_lies_off_the_line_is_doubt_of_its_slope():
    # Off by 0.1, -0.2, 0, 0.2 and -0.1 about a slope of 1: the slope's error is sqrt(0.1 / 3 / 10), for five sizes with
    # squares of 10 about the middle one. Nothing else is unsure of measured times.
    off = {12: 0.1, 13: -0.2, 14: 0.0, 15: 0.2, 16: -0.1}
    curve = ServiceTime.measured({rows: rows - 2.0 + by for rows, by in off.items()})
    assert curve.time(32) - curve.time(16) == pytest.approx(16.0)
    assert curve.time(32) - curve.lower(32) == pytest.approx(16 * 1.96 * math.sqrt(0.1 / 3 / 10), rel=0.01)


# -- the learner


def run(learner, rng, seconds, *, level=1.0, rate=100.0, sizes=(1, 2, 3, 4), cv=0.3, start=0.0, curve=affine):
    moves = []
    for second in range(1, seconds + 1):
        batches = []
        rows = 0
        while rows < rate:
            size = rng.choice(sizes)
            rows += size
            batches.append((size, 1, noisy(rng, level * curve(size), cv)))
        moved = learner.observe(start + second, cells(batches))
        if moved != 1.0:
            moves.append((second, moved))
    return moves


def test_nothing_observed_is_nothing_estimated():
    learner = LatencyLearner()
    assert learner.estimate() is None
    assert learner.observe(1.0, {}) == 1.0
    assert learner.estimate() is None
    assert learner.estimate(3) is None


@pytest.mark.parametrize("cv", [0.0, 0.1, 0.3])
def test_the_curve_is_learned(cv):
    learner = LatencyLearner()
    run(learner, Random(1), 30, cv=cv, sizes=(1, 2, 4, 8))
    service = learner.estimate()
    for rows in (1, 2, 4, 8):
        assert service.time(rows) == pytest.approx(affine(rows), rel=0.02 + cv / 4)
    assert service.noise == pytest.approx(cv, abs=0.03)


@pytest.mark.parametrize("cv", [0.0, 0.3])
@pytest.mark.parametrize("factor", [2.0, 0.5, 1.6, 8.0])
@pytest.mark.parametrize("sizes", [(1,), (1, 2, 3, 4), tuple(range(1, 33))])
def test_a_moved_level_is_relearned_within_ten_seconds(sizes, factor, cv):
    rng = Random(2)
    learner = LatencyLearner()
    run(learner, rng, 60, cv=cv, sizes=(*sizes, 64))
    moves = run(learner, rng, 7, cv=cv, sizes=sizes, level=factor, start=60)
    assert moves
    assert moves[0][0] <= 5
    service = learner.estimate()
    for rows in (sizes[0], sizes[-1]):
        assert service.time(rows) == pytest.approx(factor * affine(rows), rel=0.25)
    # 64 rows were not seen again, and moved along.
    assert service.time(64) == pytest.approx(factor * affine(64), rel=0.3)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("rate", "sizes"), [(100.0, (1, 2, 3, 4)), (100.0, (32,)), (10.0, (1,)), (3.0, (1,))])
def test_noise_moves_nothing(seed, rate, sizes):
    assert run(LatencyLearner(), Random(seed), 200, rate=rate, sizes=sizes, cv=0.3) == []


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("sizes", [(1,), tuple(range(1, 33))])
def test_a_skewed_noise_moves_nothing(seed, sizes):
    # Of exponential times the median is 0.7 of the mean: three observations in a row lie below 0.8 every minute or so.
    learner = LatencyLearner()
    moves = run(learner, Random(seed), 300, sizes=sizes, cv=1.0)
    # Within the first seconds the noise itself is hardly known.
    assert all(second <= 30 for second, _ in moves)
    # Nor are the longest taken for stalls and left out.
    learned = learner.estimate()
    level = math.fsum(learned.time(rows) / affine(rows) for rows in sizes) / len(sizes)
    assert level == pytest.approx(1.0, abs=0.06)


def test_load_alone_moves_nothing():
    # The same device at rising load: larger batches, more of them waiting at the device.
    rng = Random(3)
    learner = LatencyLearner()
    now = 0.0
    for load in (0.2, 0.5, 0.9, 0.99, 0.3):
        seen = device(1, 4, 20.0, rng, rate=load / 0.00925, batch=16, cv=0.1)
        for chunk in range(20):
            now += 1.0
            assert learner.observe(now, cells(seen[chunk * len(seen) // 20 : (chunk + 1) * len(seen) // 20])) == 1.0
    assert learner.estimate().executors == 1
    for rows in (1, 8, 16):
        assert learner.estimate().time(rows) == pytest.approx(affine(rows), rel=0.1)


@pytest.mark.parametrize("power", [1.12, 1.5])
def test_a_first_sight_of_small_batches_says_nothing_of_large_ones(power):
    # Rows cost more in a larger batch. One row takes less than its share of a batch; that is no sign of a faster model.
    def dearer(rows):
        return 0.005 * rows**power

    rng = Random(5)
    learner = LatencyLearner()
    run(learner, rng, 5, sizes=(32,), rate=64.0, cv=0.0, curve=dearer)
    assert run(learner, rng, 20, sizes=(1,), cv=0.0, curve=dearer, start=5) == []
    assert learner.estimate().time(1) == pytest.approx(dearer(1))
    assert learner.estimate().time(32) == pytest.approx(dearer(32))


@pytest.mark.parametrize("sizes", [(1,), (1, 2, 3, 4), tuple(range(1, 65))])
def test_a_stalled_host_neither_moves_nor_bends_the_curve(sizes):
    rng = Random(4)
    learner = LatencyLearner()
    run(learner, rng, 30, sizes=sizes, cv=0.1)
    before = learner.estimate()
    for second in range(31, 60):
        batches = [(size := rng.choice(sizes), 1, noisy(rng, affine(size), 0.1)) for _ in range(40)]
        if second % 5 == 0:
            # Half a second in which four batches hung.
            batches += [(rng.choice(sizes), 1, 0.5) for _ in range(2)]
        assert learner.observe(float(second), cells(batches)) == 1.0
    after = learner.estimate()
    for rows in (sizes[0], sizes[len(sizes) // 2], sizes[-1]):
        assert after.time(rows) == pytest.approx(before.time(rows), rel=0.25)


def test_what_changed_is_forgotten_in_time():
    # A drift too small to be a move: 20 % up.
    rng = Random(5)
    learner = LatencyLearner(half_life=20.0)
    run(learner, rng, 60, cv=0.1)
    assert run(learner, rng, 100, cv=0.1, level=1.2, start=60) == []
    assert learner.estimate().time(1) == pytest.approx(1.2 * affine(1), rel=0.03)


def test_many_batches_are_forgotten_sooner():
    slow, quick = LatencyLearner(half_life=1e9), LatencyLearner(half_life=1e9, half_life_batches=500)
    for learner in (slow, quick):
        rng = Random(6)
        run(learner, rng, 60, cv=0.1)
        run(learner, rng, 60, cv=0.1, level=1.2, start=60)
    assert quick.estimate().time(1) > slow.estimate().time(1)
    assert quick.estimate().time(1) == pytest.approx(1.2 * affine(1), rel=0.05)


def test_silence_unlearns_nothing():
    learner = LatencyLearner(half_life=10.0)
    run(learner, Random(7), 20, cv=0.0)
    learner.observe(3600.0, {})
    learner.observe(7200.0, cells([(1, 1, affine(1))]))
    assert learner.estimate().time(4) == pytest.approx(affine(4))
    assert learner.estimate().samples > 50


def test_counter_resets_are_ignored():
    learner = LatencyLearner()
    run(learner, Random(8), 20, cv=0.0)
    before = learner.estimate()
    backwards = [Sample(0, 1, 1, 0, -500, -2.5, -0.01), Sample(0, 2, 1, 0, 0, 0.0, 0.0)]
    assert learner.observe(21.0, backwards) == 1.0
    assert learner.estimate() == before


def test_buckets_have_their_own_curves_and_borrow_shape_when_new():
    learner = LatencyLearner()
    for second in range(1, 20):
        short = cells([(rows, 1, affine(rows)) for rows in (1, 2, 4, 8)] * 3, bucket=0)
        long = cells([(rows, 1, 3 * affine(rows)) for rows in (1, 2, 4, 8)] * 3, bucket=1)
        learner.observe(float(second), short + long)
    learner.observe(20.0, cells([(2, 1, 10 * affine(2))] * 3, bucket=2))
    assert learner.estimate(0).time(8) == pytest.approx(affine(8))
    assert learner.estimate(1).time(8) == pytest.approx(3 * affine(8))
    borrowed = learner.estimate(2)
    assert borrowed.time(2) == pytest.approx(10 * affine(2), rel=0.01)
    assert borrowed.time(8) == pytest.approx(10 * affine(8), rel=0.02)
    assert borrowed.upper(8) - borrowed.time(8) > learner.estimate(1).upper(8) - learner.estimate(1).time(8)
    # A bucket never seen is taken for the mix.
    assert learner.estimate(9) == learner.estimate()


def test_the_mix_lists_the_latency_curve_of_each_bucket_with_its_share_of_rows():
    learner = LatencyLearner()
    learner.observe(1.0, cells([(rows, 1, affine(rows)) for rows in (1, 2, 4, 8)] * 3, bucket=0))
    assert learner.mixed() == learner.estimate()
    learner.observe(2.0, cells([(5, 1, 3 * affine(5))] * 3, bucket=1))
    mixed = learner.mixed()
    assert [share for share, _ in mixed.mix] == pytest.approx([0.75, 0.25])
    assert [curve for _, curve in mixed.mix] == [learner.estimate(0), learner.estimate(1)]
    assert msgspec.structs.replace(mixed, mix=(), noise=learner.estimate().noise) == learner.estimate()
    assert mixed.noise == pytest.approx(math.hypot(*(math.sqrt(s) * curve.noise for s, curve in mixed.mix)))
    careful = mixed.pessimistic()
    assert [curve.time(5) for _, curve in careful.mix] == [curve.upper(5) for _, curve in mixed.mix]


def test_a_bucket_that_nobody_sends_any_more_leaves_the_mix():
    learner = LatencyLearner()
    for second in range(20):
        learner.observe(second, cells([(rows, 1, 3 * affine(rows)) for rows in (1, 8, 32)] * 3, bucket=3))
    for minute in range(60):
        learner.observe(60.0 + 60 * minute, cells([(rows, 1, affine(rows)) for rows in (1, 2)] * 3, bucket=0))
        if not minute:
            assert [share for share, _ in learner.mixed().mix][1] > 0.9
    assert not learner.mixed().mix


def test_what_a_batcher_is_to_believe_says_what_each_bucket_takes():
    learner = LatencyLearner()
    short = cells([(rows, 1, affine(rows)) for rows in (1, 2, 4, 8)] * 3)
    learner.observe(1.0, short)
    # Of one bucket alone there is no more to say than of all together.
    assert not learner.believed(8).buckets
    long = cells([(rows, 1, 3 * affine(rows)) for rows in (1, 2, 4, 8)] * 3, bucket=1)
    learner.observe(2.0, short + long)
    believed = learner.believed(8)
    assert believed.of(0).times[8] == pytest.approx(affine(8))
    assert believed.of(1).times[8] == pytest.approx(3 * affine(8))
    # Equal batches of one bucket take equally long; of both together they seem to be noisy.
    assert believed.of(1).noise < 0.01 < believed.noise
    assert believed.of(7) is believed.of(None) is believed


def test_a_shift_between_buckets_is_no_move():
    learner = LatencyLearner()
    rng = Random(10)
    for second in range(1, 60):
        share = 0.9 if second < 30 else 0.1
        batches = Counter(int(rng.random() > share) for _ in range(50))
        observed = []
        for bucket, count in batches.items():
            observed += cells([(1, 1, noisy(rng, (0.005, 0.05)[bucket], 0.2)) for _ in range(count)], bucket=bucket)
        assert learner.observe(float(second), observed) == 1.0


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_counters_give_a_monotone_curve_inside_its_interval(data):
    learner = LatencyLearner()
    for second in range(1, data.draw(st.integers(1, 8))):
        batches = data.draw(
            st.lists(st.tuples(st.integers(1, 64), st.integers(1, 8), st.floats(1e-5, 10.0)), max_size=20)
        )
        learner.observe(float(second), cells(batches))
    service = learner.estimate()
    if service is None:
        return
    table = service.table(128)
    assert all(a <= b + 1e-12 for a, b in pairwise(table))
    assert service.executors >= 1
    for rows in range(1, 129):
        assert 0 <= service.lower(rows) <= table[rows] + 1e-12
        assert table[rows] <= service.upper(rows) + 1e-12


def test_the_far_side_of_a_step_is_not_another_model():
    # Up to nine rows cost more and more; from there to 32, which the line through them puts at 90 ms, nothing more.
    learner = LatencyLearner()
    rng = Random(4)
    for second in range(20):
        learner.observe(float(second), cells([(rows, 1, noisy(rng, 0.0025 * rows, 0.02)) for rows in range(1, 10)]))
    for second in range(20, 26):
        far = [(rows, 1, noisy(rng, 0.0285, 0.02)) for rows in range(20, 32)]
        assert learner.observe(float(second), cells(far)) == 1.0
    assert learner.estimate().time(6) == pytest.approx(0.015, rel=0.05)
    # Quicker than nine rows were is another model, wherever it is seen.
    far = [[(rows, 1, noisy(rng, 0.01, 0.02)) for rows in range(33, 40)] for _ in range(3)]
    assert [learner.observe(26.0 + i, cells(each)) for i, each in enumerate(far)][-1] < 0.7


def test_the_near_side_of_a_step_is_not_another_model():
    # 25 rows cost 60 ms more than 24. With 20 and 26 measured, the line between them puts 24 at 73 ms.
    def step(rows):
        return 0.012 + 0.0009 * rows + 0.06 * (rows > 24)

    learner = LatencyLearner()
    for second in range(20):
        learner.observe(float(second), cells([(rows, 1, step(rows)) for rows in (16, 18, 20, 26, 32)]))
    assert learner.estimate().time(24) == pytest.approx(0.073, rel=0.05)
    for second in range(20, 26):
        assert learner.observe(float(second), cells([(24, 1, step(24))] * 4)) == 1.0
    found = learner.estimate()
    assert [found.time(rows) for rows in (20, 24, 26)] == pytest.approx([step(20), step(24), step(26)], rel=0.02)
    # Quicker than 20 rows were, or slower than 26, is another model.
    for factor in (0.4, 4.0):
        other = copy.deepcopy(learner)
        moved = [other.observe(26.0 + i, cells([(22, 1, factor * step(22))] * 4)) for i in range(3)]
        assert moved[-1] == pytest.approx(factor * 0.0318 / found.time(22), rel=0.1)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_sizes_between_several_measured_ones_that_are_all_off_show_another_model(factor):
    # A step explains one gap between measured sizes. Batches of 6 to 12 and of 20 to 50 rows lie in two.
    learner = LatencyLearner()
    for second in range(20):
        learner.observe(float(second), cells([(rows, 1, affine(rows)) for rows in (4, 16, 64)] * 4))
    others = [(rows, 1, factor * affine(rows)) for rows in (6, 8, 10, 12, 20, 30, 40, 50)]
    moved = [learner.observe(20.0 + i, cells(others)) for i in range(3)]
    assert moved[-1] == pytest.approx(factor, rel=0.1)
    assert learner.estimate().time(64) == pytest.approx(factor * affine(64), rel=0.1)
