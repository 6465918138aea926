from __future__ import annotations

import pytest

from carpool_sidecar.tuning.stalls import INTERVAL, StallWatcher


@pytest.fixture
def watcher():
    return StallWatcher(clock=lambda: 100.0)


def test_waking_in_time_is_no_pause(watcher):
    for tick in range(1, 10):
        watcher.woke(100.0 + tick * (INTERVAL + 0.015))
    assert (watcher.total, watcher.count) == (0.0, 0)
    assert not watcher.overlaps(100.0, 100.3)


def test_a_late_wake_up_is_a_pause_from_when_it_was_due(watcher):
    watcher.woke(100.02)
    watcher.woke(100.54)
    assert watcher.total == pytest.approx(0.5)
    assert watcher.count == 1
    watcher.woke(100.56)
    assert watcher.overlaps(100.0, 100.1)
    assert watcher.overlaps(100.2, 100.3)
    assert watcher.overlaps(100.5, 100.56)
    assert not watcher.overlaps(100.0, 100.03)
    assert not watcher.overlaps(100.55, 100.57)


def test_a_pause_that_the_watcher_still_sleeps_through_counts(watcher):
    watcher.woke(100.02)
    assert watcher.overlaps(100.01, 100.5)
    assert not watcher.overlaps(100.01, 100.03)


def test_older_pauses_are_found_behind_newer_ones(watcher):
    watcher.woke(100.2)
    watcher.woke(100.22)
    watcher.woke(100.5)
    watcher.woke(100.52)
    assert watcher.overlaps(100.1, 100.15)
    assert not watcher.overlaps(100.205, 100.215)


def test_the_thread_watches_and_ends():
    watcher = StallWatcher()
    watcher.start()
    watcher.stop()
