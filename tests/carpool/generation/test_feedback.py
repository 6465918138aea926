import pytest

from carpool.generation.feedback import Ratios


def test_it_starts_as_given_and_becomes_the_quantile_of_what_was_seen():
    ratios = Ratios(0.9, start=1.3, lowest=0.5, highest=4.0)
    assert ratios.value == 1.3
    for i in range(100):
        ratios.add(1.0 + i / 100, 1.0)
    assert ratios.value == pytest.approx(1.9)


def test_it_forgets_and_stays_within_bounds():
    ratios = Ratios(0.5, start=1.0, lowest=0.5, highest=4.0, memory=50)
    for _ in range(50):
        ratios.add(100.0, 1.0)
    assert ratios.value == 4.0
    for _ in range(50):
        ratios.add(0.1, 1.0)
    assert ratios.value == 0.5


def test_a_forecast_of_nothing_counts_as_far_exceeded():
    ratios = Ratios(0.5, start=1.0, lowest=0.5, highest=4.0)
    for _ in range(20):
        ratios.add(1.0, 0.0)
    assert ratios.value == 4.0
