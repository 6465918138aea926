"""How many batches a device computes at once, fitted from batches that overlap."""

from __future__ import annotations

from random import Random

import pytest
from service_times import affine, cells, device, sample

from carpool.batching.counters import Sample
from carpool.learning.concurrency import fit_executors
from carpool.learning.latency_model import fit


@pytest.mark.parametrize("cv", [0.0, 0.3])
@pytest.mark.parametrize(
    ("executors", "slots", "load"),
    [(1, 4, 0.5), (1, 4, 0.9), (2, 4, 0.8), (4, 4, 0.7), (4, 4, 0.95), (8, 8, 0.8), (1, 2, 0.8)],
)
def test_server_concurrency_is_fitted_from_the_wait(executors, slots, load, cv):
    rng = Random(executors * 10 + slots)
    # Sizes 1 to 16 last 9.25 ms on average.
    seen = device(executors, slots, 60.0, rng, rate=load * executors / 0.00925, batch=16, cv=cv)
    service = fit(cells(seen))
    assert service.executors == pytest.approx(executors, rel=0.13)
    assert service.largest_in_flight == max(in_flight for _, in_flight, _, _ in seen)
    for rows in (2, 8, 15):
        assert service.time(rows) == pytest.approx(affine(rows), rel=0.12)


def test_three_batches_that_hardly_overlapped_do_not_show_server_concurrency_2():
    # Each left 0.1 to 0.7 ms before the one ahead of it was done: begun at once or then, both could be.
    alone = [
        sample(rows, [mean * (1 + 0.05 * sign) for sign in (-1, 1) for _ in range(100)])
        for rows, mean in ((6, 0.00524), (7, 0.00591), (12, 0.0075))
    ]
    seen, own = (0.00746, 0.00531, 0.0062), (0.00677, 0.00516, 0.00619)
    pairs = [sample(rows, [took], 2) for rows, took in zip((12, 6, 7), seen, strict=True)]
    supposed = [s._replace(executors=1, busy=t, busy_squared=t * t) for s, t in zip(pairs, own, strict=True)]
    assert fit([*alone, *pairs, *supposed], 1).executors == 1


def test_without_overlapping_batches_server_concurrency_stays_1_or_as_known():
    assert fit([sample(1, [0.01] * 50)]).executors == 1
    assert fit([sample(1, [0.01] * 50)], 4).executors == 4


@pytest.mark.parametrize(("executors", "slots"), [(1, 4), (2, 4), (4, 4), (3, 8), (8, 8)])
@pytest.mark.parametrize("cv", [0.05, 0.3])
def test_server_concurrency_is_fitted_on_a_device_that_is_always_full(executors, slots, cv):
    seen = device(executors, slots, 60.0, Random(1), rate=2 * executors / 0.00925, batch=16, cv=cv)
    # As if it had been full from the first.
    service = fit(cells([batch for batch in seen if batch[1] == slots]))
    assert service.executors == executors
    assert service.time(8) == pytest.approx(affine(8), rel=0.1)


def test_a_known_server_concurrency_outlives_samples_that_say_nothing_about_it():
    full = [sample(1, [0.04] * 50, in_flight=4)]
    assert fit(full, 4).executors == 4
    assert fit(full, 4).time(1) == pytest.approx(0.04)


def test_saturation_does_not_pollute_the_curve():
    seen = device(1, 4, 60.0, Random(1), rate=200.0, batch=16)
    service = fit(cells(seen))
    assert service.executors == 1
    assert service.table(16) == pytest.approx([0.0] + [affine(rows) for rows in range(1, 17)])


def test_batches_that_say_nothing_about_server_concurrency_do_not_hide_those_that_do():
    # Server concurrency 4, noise of 40 %: 3,000 batches never met more than two others in flight, 300 met three. At
    # server concurrency 3 the fourth would have begun late and been quick: these 300 spread so much that it shows.
    rng = Random(1)
    settled, supposed = [], []
    for in_flight, count in ((1, 1000), (2, 1000), (3, 1000), (4, 300)):
        times = [0.1 * rng.gammavariate(6.25, 1 / 6.25) for _ in range(count)]
        settled.append(Sample(0, 8, in_flight, 0, count, sum(times), sum(t * t for t in times)))
        for executors in range(1, in_flight):
            late = [max(t - 0.1 * rng.random(), 0.0) for t in times]
            supposed.append(Sample(0, 8, in_flight, executors, count, sum(late), sum(t * t for t in late)))
    assert fit(settled + supposed).executors == 4
    assert fit(settled + supposed, 3).executors == 4


@pytest.mark.parametrize("executors", [3, 4])
def test_server_concurrency_is_fitted_from_the_mean_before_the_spread(executors):
    # A fourth batch waits for one of three, or does not: of 150 so noisy ones the spread is alike either way.
    rng = Random(2)
    seen = []
    for in_flight, count in ((1, 500), (2, 500), (3, 500), (4, 150)):
        own = [0.1 * rng.gammavariate(6.25, 1 / 6.25) for _ in range(count)]
        late = [0.045 * rng.random() if in_flight == 4 else 0.0 for _ in own]
        took = [t + (w if executors == 3 else 0.0) for t, w in zip(own, late, strict=True)]
        seen.append(Sample(0, 8, in_flight, 0, count, sum(took), sum(t * t for t in took)))
        if in_flight == 4:
            spent = [t - w for t, w in zip(took, late, strict=True)]
            seen.append(Sample(0, 8, in_flight, 3, count, sum(spent), sum(t * t for t in spent)))
    assert {fit(seen, known).executors for known in (3, 4)} == {executors}


@pytest.mark.parametrize(("often", "found"), [(40, (3, False)), (200, (4, True))])
def test_one_slow_batch_does_not_overrule_the_means_that_show_server_concurrency(often, found):
    # The server concurrency is 4, and 3 is known. Batches of 12 rows met six in flight; their mean says that 4 were
    # served at once. One batch of 45 rows that met four took ten times as long, and was counted for 4, not for 3.
    def counted(rows, in_flight, batches, mean, cv, executors=0):
        return Sample(0, rows, in_flight, executors, batches, batches * mean, batches * mean**2 * (1 + cv**2))

    alone = [counted(12, 1, often, 0.043, 0.4), counted(12, 2, 30, 0.043, 0.4), counted(12, 2, 30, 0.02, 0.9, 1)]
    means = (0.061, 0.3), (0.0134, 0.9), (0.0222, 0.6), (0.0335, 0.5), (0.0436, 0.42)
    full = [counted(12, 6, often, *each, executors) for executors, each in enumerate(means)]
    means = (0.23, 0.8), (0.17, 0.9), (0.2, 0.8), (0.1, 0.2)
    slow = [counted(45, 4, 2.0 if executors == 3 else 2.6, *each, executors) for executors, each in enumerate(means)]
    samples = [*alone, counted(45, 1, 100, 0.11, 0.4), *full, *slow]
    assert fit_executors(samples, 3) == found
    # Where the concurrency is left open, more batches in flight are worth exploring.
    assert fit(samples, 3).executors_for(6) == (4 if found[1] else 6)


@pytest.mark.parametrize(("overtook", "found"), [(0, 1), (9, 1), (40, 2)])
def test_late_notice_of_answers_is_not_taken_for_batches_computed_at_once(overtook, found):
    # Three in flight at a server that takes them in turn, 25 ms each, whose answers are noticed late. That adds as much
    # to the variance of 25 ms as to that of 75 ms, so over the mean it is 3.75 times as large at a concurrency of 1 as
    # at 3. Batches that are computed at once and vary as much often overtake each other.
    batches, spreads = 60, {0: (0.075, 2e-4), 1: (0.025, 2.5e-4), 2: (0.05, 2.2e-4)}
    samples = [
        Sample(0, 4, 3, executors, batches, batches * mean, batches * (mean**2 + variance))
        for executors, (mean, variance) in spreads.items()
    ]
    samples.append(Sample(0, 4, 3, 3, overtook, overtook * 0.06, overtook * 0.06**2))
    assert fit_executors(samples, None)[0] == fit_executors(samples, 1)[0] == found
