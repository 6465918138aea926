from __future__ import annotations

import pytest
from examples import CURVE
from msgspec.structs import replace

from carpool.learning.change_detection import has_changed, is_another_model, width
from carpool.learning.latency_model import ServiceTime


def curve(level=1.0, unsure=0.0, largest=8):
    """Return a fit that takes ``level`` times the reference, in intervals as wide as ``unsure`` times that."""
    exact = ServiceTime.measured({rows: level * CURVE.time(rows) for rows in range(1, largest + 1)})
    return replace(
        exact,
        lowers=tuple(mean * (1 - unsure / 2) for mean in exact.means),
        uppers=tuple(mean * (1 + unsure / 2) for mean in exact.means),
    )


def at(rows, factor, unsure=0.0):
    """Return the reference with one size that takes ``factor`` times as long."""
    known = curve(unsure=unsure)

    def bent(values):
        return tuple(value * (factor if size == rows else 1.0) for size, value in zip(known.sizes, values, strict=True))

    return replace(known, means=bent(known.means), lowers=bent(known.lowers), uppers=bent(known.uppers))


def test_width_is_that_of_the_interval_relative_to_the_time():
    assert width(curve(), 4) == 0
    assert width(curve(unsure=0.3), 4) == pytest.approx(0.3)
    assert width(curve(level=2.0, unsure=0.3), 8) == pytest.approx(0.3)


# -- what is searched anew for


def test_a_first_fit_is_a_change_and_the_same_fit_again_is_not():
    assert has_changed(curve(), None)
    assert not has_changed(curve(), curve())


@pytest.mark.parametrize("found", [{"executors": 2}, {"largest_in_flight": 2}])
def test_more_server_concurrency_is_a_change_and_so_are_more_batches_in_flight(found):
    assert has_changed(replace(curve(), **found), curve())
    assert has_changed(curve(), replace(curve(), **found))


def test_a_fifth_more_rows_than_the_largest_known_size_are_a_change():
    assert not has_changed(curve(largest=11), curve(largest=10))
    assert has_changed(curve(largest=12), curve(largest=10))
    assert not has_changed(curve(largest=8), curve(largest=10))


@pytest.mark.parametrize(("level", "news"), [(0.975, True), (0.985, False), (1.015, False), (1.025, True)])
def test_a_difference_that_both_fits_are_sure_of_is_a_change_from_two_percent_on(level, news):
    assert has_changed(curve(level), curve()) is news


def test_one_size_is_enough():
    assert has_changed(at(5, 1.03), curve())
    assert is_another_model(at(5, 1.2), curve())


def test_another_mean_inside_what_was_unsure_is_chance():
    assert not has_changed(curve(1.1, unsure=0.15), curve(unsure=0.15))


@pytest.mark.parametrize(
    ("was", "is_now", "news"),
    [
        (0.18, 0.13, False),  # of 0.18, twice the evidence leaves 0.127
        (0.18, 0.12, True),
        (0.40, 0.21, False),  # as much more, and still too little to go by
        (0.40, 0.19, True),
    ],
)
def test_twice_the_evidence_replaces_a_first_guess_once_it_is_sure_enough(was, is_now, news):
    # 1.05 lies in both intervals.
    assert has_changed(curve(1.05, unsure=is_now), curve(unsure=was)) is news
    assert not has_changed(curve(unsure=is_now), curve(unsure=was)), "it says the same"


# -- what is tried anew for


def test_a_first_fit_is_another_model_and_the_same_again_is_not():
    assert is_another_model(curve(), None)
    assert not is_another_model(curve(), curve())


def test_more_server_concurrency_is_another_model_and_more_batches_in_flight_are_not():
    assert is_another_model(replace(curve(), executors=2), curve())
    assert not is_another_model(replace(curve(), largest_in_flight=2), curve())


@pytest.mark.parametrize(("level", "another"), [(0.88, True), (0.92, False), (1.08, False), (1.12, True)])
def test_what_both_fits_are_sure_of_makes_another_model_from_ten_percent_on(level, another):
    assert is_another_model(curve(level), curve()) is another


def test_what_chance_explains_is_no_other_model_however_sure_it_is_by_now():
    assert not is_another_model(curve(1.2, unsure=0.01), curve(unsure=0.5))
    assert is_another_model(curve(1.2, unsure=0.01), curve(unsure=0.3))


def test_sizes_beyond_the_largest_measured_since_say_nothing_of_the_model():
    # Five to eight rows take as long as four; by one to four alone they would go on to take longer.
    flat = ServiceTime.measured({rows: CURVE.time(min(rows, 4)) for rows in range(1, 9)})
    assert curve(largest=4).lower(8) > 1.2 * flat.upper(8)
    assert not is_another_model(curve(largest=4), flat)
    assert is_another_model(curve(), flat)
