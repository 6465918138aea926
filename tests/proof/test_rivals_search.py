from __future__ import annotations

from random import Random

import pytest
from proof.rivals import search
from rivalry import counted, known


class Traffic:
    """Answers to whatever a searcher tries, a second at a time."""

    def __init__(self, searcher, *, rate=100, verdict=lambda parameters: (0.0, 0.001)):
        self.searcher = searcher
        self.rate = rate
        self.verdict = verdict
        self.parameters = searcher.start().parameters
        self.tried = [self.parameters]
        self.at = self.hits = self.missed = 0
        self.busy = 0.0

    def run(self, seconds):
        for _ in range(seconds):
            misses, device = self.verdict(self.parameters)
            missed = round(misses * self.rate)
            self.at += 1
            self.hits += self.rate - missed
            self.missed += missed
            self.busy += self.rate * device
            ended = self.hits + self.missed
            stats = counted(float(self.at), arrivals=ended, hits=self.hits, missed=self.missed, busy=self.busy)
            changed = self.searcher.observe(float(self.at), [stats])
            if changed is not None:
                (setting,) = changed
                self.parameters = setting.parameters
                self.tried.append(self.parameters)


@pytest.fixture(params=[search.random_search, search.tpe])
def maker(request):
    return request.param


def worse_the_longer_held(parameters):
    return (0.0 if parameters.max_wait < 0.020 else 0.02), 0.0055 / parameters.max_batch


def test_it_begins_with_the_half_slo_rule_and_tries_each_for_a_window(maker):
    traffic = Traffic(maker(known(), Random(0)))
    assert (traffic.parameters.max_batch, traffic.parameters.max_wait) == (40, 0.025)
    traffic.run(10)
    assert len(traffic.tried) == 1  # the first second settles
    traffic.run(1)
    assert len(traffic.tried) == 2
    traffic.run(11)
    assert len(traffic.tried) == 3


def test_few_requests_take_a_longer_window(maker):
    traffic = Traffic(maker(known(), Random(0)), rate=15)
    traffic.run(20)
    assert len(traffic.tried) == 1
    traffic.run(1)
    assert len(traffic.tried) == 2


def test_no_traffic_is_no_trial(maker):
    traffic = Traffic(maker(known(), Random(0)), rate=0)
    traffic.run(100)
    assert len(traffic.tried) == 1


def test_it_chooses_the_cheapest_parameters_that_meet_the_slo(maker):
    traffic = Traffic(maker(known(), Random(0)), verdict=worse_the_longer_held)
    traffic.run(400)
    assert len(traffic.tried) == search.TRIALS + 1
    good = [each for each in traffic.tried[:-1] if each.max_wait < 0.020]
    assert good
    assert traffic.parameters.max_batch == max(each.max_batch for each in good)
    assert traffic.parameters.max_wait < 0.020


def test_where_none_keeps_it_the_least_bad_is_kept(maker):
    traffic = Traffic(maker(known(), Random(0)), verdict=lambda parameters: (parameters.max_batch / 100, 0.001))
    traffic.run(400)
    assert traffic.parameters.max_batch == min(each.max_batch for each in traffic.tried)


def test_a_hopeless_one_is_given_up_early(maker):
    traffic = Traffic(maker(known(), Random(0)), verdict=lambda _: (0.5, 0.001))
    traffic.run(2)
    assert len(traffic.tried) == 2


def test_when_the_load_has_moved_it_searches_again_from_the_best(maker):
    traffic = Traffic(maker(known(), Random(0)), verdict=worse_the_longer_held)
    traffic.run(400)
    best = traffic.parameters
    traffic.rate = 120
    traffic.run(100)
    assert len(traffic.tried) == search.TRIALS + 1  # a fifth more is the same load
    traffic.rate = 200
    traffic.run(25)
    assert traffic.tried[search.TRIALS + 1] == best
    traffic.run(11)
    assert len(traffic.tried) > search.TRIALS + 2


def test_seeds_replay(maker):
    tried = []
    for seed in (1, 1, 2):
        traffic = Traffic(maker(known(), Random(seed)), verdict=worse_the_longer_held)
        traffic.run(200)
        tried.append(traffic.tried)
    assert tried[0] == tried[1]
    assert tried[0] != tried[2]


def test_points_lie_within_the_limits(maker):
    for largest, in_flight in ((1, 1), (64, 8)):
        traffic = Traffic(maker(known(largest=largest, in_flight=in_flight), Random(3)))
        traffic.run(200)
        assert {each.max_batch for each in traffic.tried} <= set(range(1, largest + 1))
        assert {each.max_in_flight for each in traffic.tried} <= set(range(1, in_flight + 1))
        assert all(0 <= each.max_wait <= 0.025 for each in traffic.tried)


def test_it_runs_on_the_batcher(maker):
    assert maker(known(), Random(0)).dispatcher() is None
