from __future__ import annotations

from carpool_sidecar.jobs.headroom import FIRST_PAUSE, LONGEST_PAUSE, Headroom


def test_it_begins_with_one_and_grows_with_answers_up_to_the_most():
    headroom = Headroom(4)
    seen = []
    for _ in range(30):
        seen.append(headroom.room(0, 0.0))
        headroom.answered()
    assert seen[0] == 1
    assert seen == sorted(seen)
    assert seen[-1] == 4
    assert headroom.room(3, 0.0) == 1


def test_a_refusal_halves_it_and_pauses_longer_each_time():
    headroom = Headroom(8)
    for _ in range(50):
        headroom.answered()
    now, pauses = 0.0, []
    for _ in range(10):
        headroom.refused(0.0, now)
        headroom.refused(0.0, now)  # of the same moment: counted once
        resumed = next(now + step / 100 for step in range(1, 10_000) if headroom.room(0, now + step / 100))
        pauses.append(resumed - now)
        now = resumed
    assert headroom.limit == 1
    assert abs(pauses[0] - FIRST_PAUSE) < 0.02
    assert pauses == sorted(pauses)
    assert abs(pauses[-1] - LONGEST_PAUSE) < 0.02
    headroom.answered()
    headroom.refused(7.0, now)
    assert headroom.room(0, now + 6.9) == 0
    assert headroom.room(0, now + 7.0) == 1


def test_nothing_begins_while_the_device_is_busy():
    headroom = Headroom(4)
    busy = 0.0
    for step in range(100):
        headroom.update(busy, step * 0.1)
        busy += 0.1
    assert headroom.share > 0.95
    assert headroom.room(0, 10.0) == 0
    for step in range(100, 110):
        headroom.update(busy, step * 0.1)
    assert headroom.share < 0.5
    assert headroom.room(0, 11.0) == 1


def test_a_look_at_once_after_another_says_nothing():
    headroom = Headroom(4)
    headroom.update(0.0, 0.0)
    headroom.update(0.01, 0.01)  # a job of 10 ms is no busy second
    assert headroom.share == 0.0
