from __future__ import annotations

from carpool.batching.counters import DURATION_BOUNDS, ModelStats
from carpool_cli.live.figures import duration, figures_of, number

BATCHES = [(0, 4, 1, 0, 3, 0.03, 0.0), (0, 1, 1, 0, 1, 0.005, 0.0), (0, 4, 2, 1, 3, 0.03, 0.0)]


def counted() -> ModelStats:
    durations = [0] * (len(DURATION_BOUNDS) + 1)
    durations[20] = 12
    return ModelStats(
        arrivals=20,
        dispatched=13,
        served=12,
        hits=11,
        misses={"late": 1, "failed": 1, "queue": 2},
        cells=BATCHES,
        durations=durations,
    )


def test_counters_become_rates_and_shares():
    figures = figures_of([counted()], 2.0, device_busy=0.5)
    assert (figures.rate, figures.goodput) == (10.0, 5.5)
    assert figures.miss_share == 4 / 15
    assert figures.misses == {"failed": 1, "late": 1, "queue": 2}
    assert figures.device_busy_share == 0.25
    assert figures.device_seconds_per_request == 0.5 / 13  # a failed request took its share
    assert DURATION_BOUNDS[19] < figures.p50 < figures.p99 <= DURATION_BOUNDS[20]


def test_a_batch_is_counted_once_though_its_cells_repeat_it_per_server_concurrency():
    figures = figures_of([counted()], 2.0)
    assert figures.sizes == {1: 1, 4: 3}
    assert figures.mean_batch == 13 / 4


def test_models_add_up():
    assert figures_of([counted(), counted()], 2.0).sizes == {1: 2, 4: 6}


def test_without_counts_there_are_no_figures():
    figures = figures_of([], 0.0)
    assert (figures.rate, figures.goodput, figures.device_busy_share) == (0.0, 0.0, 0.0)
    assert figures.p99 is figures.miss_share is figures.mean_batch is figures.device_seconds_per_request is None


def test_a_duration_has_three_digits():
    assert [duration(each) for each in (0.022654, 0.0007251, 1.0, None)] == ["22.7ms", "725us", "1s", "-"]


def test_a_number_is_never_written_in_powers_of_ten():
    values = (40_000.0, 49_760.4, 999.96, 12.345, 0.12345, 0.0)
    assert [number(each) for each in values] == ["40,000", "49,760", "1000", "12.35", "0.1235", "0"]
