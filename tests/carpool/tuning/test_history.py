from __future__ import annotations

from carpool.tuning.history import SILENCE, History


def observed(*seen):
    history = History()
    for now, arrivals in seen:
        history.observe(now, arrivals)
    return history


def test_silence_is_half_a_minute_without_an_arrival():
    assert not observed((10.0, 5), (10.0 + SILENCE, 0)).is_silent
    assert observed((10.0, 5), (10.5 + SILENCE, 0)).is_silent
    assert observed((10.0, 5), (10.5 + SILENCE, 0)).silence == "no request for 30.5s"


def test_before_the_first_arrival_it_counts_from_the_start():
    quiet = observed((100.0, 0), (110.0, 0))
    assert not quiet.is_silent
    assert quiet.silence == observed((100.0, 0)).silence == "no request yet"
    assert observed((100.0, 0), (100.5 + SILENCE, 0)).is_silent


def test_time_and_requests_count_from_the_last_change():
    history = observed((10.0, 5), (12.0, 5))
    assert history.since_change == 2.0
    history.requests = 70
    history.changed()
    assert (history.since_change, history.requests) == (0.0, 0)
    history.observe(15.0, 1)
    assert history.since_change == 3.0
