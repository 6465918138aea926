from __future__ import annotations

from math import inf

from carpool_sidecar.jobs.headroom import FIRST_PAUSE, LONGEST_PAUSE, Headroom, Seen


def grown(most):
    """One that has gone well for a while; the time by now is 20 s."""
    headroom = Headroom(most)
    for second in range(21):
        headroom.update(Seen(0.0), float(second))
    return headroom


def test_it_begins_with_one_and_grows_up_to_the_most():
    headroom, seen = Headroom(4), []
    for second in range(20):
        headroom.update(Seen(0.0), float(second))
        seen.append(headroom.room(0, float(second)))
    assert seen[0] == 1
    assert seen == sorted(seen)
    assert seen[-1] == 4
    assert headroom.room(3, 20.0) == 1


def test_a_refusal_halves_what_its_path_may_have_and_pauses_it_longer_each_time():
    headroom = grown(8)
    now, pauses = 20.0, []
    for _ in range(10):
        headroom.refused("/a", 0.0, now)
        headroom.refused("/a", 0.0, now)  # of the same moment: counted once
        resumed = next(now + step / 100 for step in range(1, 10_000) if headroom.rest([], now + step / 100).of("/a"))
        pauses.append(resumed - now)
        now = resumed
    assert headroom.rest([], now).of("/a") == 1
    assert headroom.rest(["/a", "/b"], now).closed == ["/a"]
    assert abs(pauses[0] - FIRST_PAUSE) < 0.02
    assert pauses == sorted(pauses)
    assert abs(pauses[-1] - LONGEST_PAUSE) < 0.02
    headroom.answered("/a")
    headroom.refused("/a", 7.0, now)
    assert headroom.rest([], now + 6.9).of("/a") == 0
    assert headroom.rest([], now + 7.0).of("/a") == 1


def test_a_refusal_bounds_no_other_path():
    headroom = grown(8)
    for _ in range(10):
        headroom.refused("/a", 0.0, 20.0)
    assert headroom.rest([], 20.0).closed == ["/a"]
    assert headroom.rest(["/b"] * 7, 20.0).of("/b") == inf
    assert headroom.room(7, 20.0) == 1


def test_a_path_that_refused_grows_back_and_is_forgotten():
    headroom = grown(8)
    headroom.refused("/a", 0.0, 20.0)
    seen = []
    for second in range(21, 100):
        headroom.update(Seen(0.0), float(second))
        seen.append(headroom.rest([], float(second)).of("/a"))
    assert seen[:2] == [4, 4]
    assert seen == sorted(seen)
    assert seen[-1] == inf


def test_with_one_at_a_time_pauses_still_grow():
    headroom = Headroom(1)
    headroom.update(Seen(0.0), 0.0)
    now = 0.0
    for _ in range(8):  # refused as soon as it may begin
        headroom.refused("/a", 0.0, now)
        while not headroom.rest([], now).of("/a"):
            now += 0.25
            headroom.update(Seen(0.0), now)
    assert now > 2 * LONGEST_PAUSE


def test_nothing_begins_while_the_device_is_busy():
    headroom = Headroom(4)
    busy = 0.0
    for step in range(100):
        headroom.update(Seen(busy), step * 0.1)
        busy += 0.1
    assert headroom.share > 0.95
    assert headroom.room(0, 10.0) == 0
    for step in range(100, 110):
        headroom.update(Seen(busy), step * 0.1)
    assert headroom.share < 0.5
    assert headroom.room(0, 11.0) > 0


def test_a_look_at_once_after_another_says_nothing():
    headroom = Headroom(4)
    headroom.update(Seen(0.0), 0.0)
    headroom.update(Seen(0.01), 0.01)  # a job of 10 ms is no busy second
    assert headroom.share == 0.0


def test_it_yields_while_people_miss_the_slo_and_comes_back_slowly():
    headroom = grown(8)
    headroom.update(Seen(0.0, 297, 3), 21.0)  # 1 %: as many as are allowed
    assert headroom.limit == 8
    met, limits = 297, []
    for missed in range(4, 9):
        met += 50
        headroom.update(Seen(0.0, met, missed), 18.0 + missed)
        limits.append(headroom.room(0, 18.0 + missed))
    assert limits == [4, 2, 1, 0, 0]  # with one, still too many: a pause of 250 ms, then of 500 ms
    for second in range(27, 63):
        headroom.update(Seen(0.0, met, 8), float(second))
    assert 1 <= headroom.room(0, 63.0) <= 2
