from __future__ import annotations

from random import Random

from proof.rivals.aimd import contender
from rivalry import counted, known

from carpool.batching.counters import Stats


class Traffic:
    """Counters that grow by what is said, seen by a contender once a second."""

    def __init__(self, aimd):
        self.aimd = aimd
        self.at = self.hits = self.missed = 0
        aimd.observe(0.0, [counted(0.0, arrivals=0, hits=0)])

    def second(self, hits, missed=0):
        self.at += 1
        self.hits += hits
        self.missed += missed
        stats = counted(float(self.at), arrivals=self.hits + self.missed, hits=self.hits, missed=self.missed)
        changed = self.aimd.observe(float(self.at), [stats])
        return None if changed is None else changed[0].parameters.max_batch


def test_it_makes_a_saw_tooth():
    traffic = Traffic(contender(known(), Random(0)))
    assert [traffic.second(1000) for _ in range(3)] == [41, 42, 43]
    assert traffic.second(980, 20) == 38
    assert traffic.second(990, 10) == 39  # one in a hundred is what was promised


def test_it_waits_for_enough_answers():
    traffic = Traffic(contender(known(), Random(0)))
    assert [traffic.second(100) for _ in range(3)] == [None, None, 41]
    assert traffic.second(0) is None


def test_it_stays_within_the_limits():
    traffic = Traffic(contender(known(largest=1), Random(0)))
    assert traffic.second(1000) is None
    traffic = Traffic(contender(known(slo=10.0), Random(0)))
    assert traffic.second(1000) is None  # 64 already


def test_from_the_smallest_it_goes_back_to_where_it_began():
    traffic = Traffic(contender(known(slo=0.014), Random(0)))  # two rows take 6 ms, and four 7
    seen = [traffic.second(0, 1000) for _ in range(5)]
    assert seen == [3, 2, 1, 4, 3]


def test_replicas_count_together():
    aimd = contender(known(), Random(0))
    aimd.observe(0.0, [Stats(0.0), Stats(0.0)])
    settings = aimd.observe(
        1.0, [counted(1.0, arrivals=200, hits=200), counted(1.0, arrivals=200, hits=190, missed=10)]
    )
    assert [setting.parameters.max_batch for setting in settings] == [36]
    assert aimd.start().parameters.max_batch == 36
    assert aimd.dispatcher() is None
