"""What jobs cost interactive requests, in virtual time: the real Batcher and the real headroom, one device."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count
from math import inf
from random import Random

import pytest

from carpool.batching.batcher import Batcher
from carpool.batching.requests import Batch, Finish, Priority, Request
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool_sidecar.jobs.headroom import SHARE, Headroom, Seen
from carpool_sidecar.jobs.runner import LOOK

SECONDS = 60.0
SLO = 0.05
MOST = 16


class World:
    """A device with batch latency 5 + 0.5 b ms behind a Batcher; interactive requests (Poisson), and endless jobs."""

    def __init__(self, rate, seed, *, jobs, slo=SLO, largest=MOST):
        self.random, self.jobs, self.rate, self.slo = Random(seed), jobs, rate, slo
        self.batcher = Batcher(Parameters(max_batch=largest, max_wait=Duration(0.0), max_in_flight=1))
        self.headroom = Headroom(MOST)
        self.events, self.order, self.under_way = [], count(), 0
        self.waits, self.done, self.missed = [], 0, 0

    def at(self, time, kind, what=None):
        heappush(self.events, (time, next(self.order), kind, what))

    def run(self):
        self.at(self.random.expovariate(self.rate), "person")
        self.at(0.0, "look")
        while self.events[0][0] < SECONDS:
            now, _, kind, what = heappop(self.events)
            if kind == "person":
                self.at(now + self.random.expovariate(self.rate), "person")
                self.do(self.batcher.arrive(Request(key=b"k", arrived=now, due=now + self.slo), now), now)
            elif kind == "done":
                self.do(self.batcher.complete(what, now), now)
            else:
                self.at(now + LOOK, "look")
            if self.jobs:
                self.start(now)
        return self

    def start(self, now):
        self.headroom.update(Seen(self.batcher.busy(now), len(self.waits) - self.missed, self.missed), now)
        for _ in range(self.headroom.room(self.under_way, now)):
            self.under_way += 1
            job = Request(key=b"k", arrived=now, due=inf, priority=Priority.LOW, shadow=True)
            self.do(self.batcher.arrive(job, now), now)

    def do(self, actions, now):
        for action in actions:
            if isinstance(action, Batch):
                self.at(now + 0.005 + 0.0005 * action.rows, "done", action)
                continue
            for request in action.requests if isinstance(action, Finish) else (action.request,):
                if request.shadow:
                    self.under_way -= 1
                    self.done += 1
                    self.headroom.answered("/")
                else:
                    self.waits.append(now - request.arrived if isinstance(action, Finish) else inf)
                    self.missed += self.waits[-1] > self.slo

    def quantile(self, share):
        return sorted(self.waits)[int(share * len(self.waits))]

    @property
    def busy(self):
        return self.batcher.busy(SECONDS) / SECONDS


@pytest.mark.parametrize(("rate", "seed"), [(20, 1), (60, 2), (120, 3)])
def test_jobs_fill_what_is_left_and_people_wait_for_one_batch_at_most(rate, seed):
    alone, shared = World(rate, seed, jobs=False).run(), World(rate, seed, jobs=True).run()
    assert len(shared.waits) == pytest.approx(len(alone.waits), rel=0.01)
    # 1. The device is used up to the share, and not beyond it.
    assert alone.busy < 0.75
    assert shared.busy == pytest.approx(SHARE, abs=0.05)
    assert shared.done > 20 * SECONDS
    # 2. A person waits for the batch that is under way: 13 ms at most.
    largest = 0.005 + 0.0005 * MOST
    assert shared.quantile(0.99) <= alone.quantile(0.99) + largest
    assert not shared.missed


def test_where_the_slo_is_tighter_than_that_jobs_yield_until_people_meet_it():
    # 15 ms: people alone have a p99 of 11 ms, with as many jobs as fit 19 ms.
    world = World(60, 2, jobs=True, slo=0.015).run()
    assert world.missed / len(world.waits) < 0.01
    assert SECONDS * 100 < world.done < 0.75 * World(60, 2, jobs=True).run().done


def test_in_overload_jobs_leave_the_device_to_people():
    # One row at a time, 5.5 ms each: 220 requests/s are more than it can do.
    world = World(220, 4, jobs=True, largest=1).run()
    assert world.headroom.share > 0.95
    assert world.done < 0.01 * len(world.waits)
