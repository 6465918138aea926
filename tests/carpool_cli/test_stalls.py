from __future__ import annotations

from carpool_cli.stalls import PERIOD, THRESHOLD, Stall, StallWatcher


def test_only_a_sleep_far_beyond_its_time_is_a_stall():
    watcher = StallWatcher()
    watcher.woke(1.0, 1.0 + PERIOD + THRESHOLD / 2)
    assert watcher.stalls == []
    watcher.woke(2.0, 2.5)
    assert watcher.stalls == [Stall(2.0 + PERIOD, 2.5)]


def test_it_ends_with_its_block():
    with StallWatcher() as watcher:
        assert watcher._thread.is_alive()
    assert not watcher._thread.is_alive()
