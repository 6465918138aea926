from __future__ import annotations

import logging

import pytest

from carpool.batching.batcher import Batcher
from carpool.batching.counters import FAILED, LATE
from carpool.batching.requests import Refused
from carpool.policy.parameters import Parameters
from carpool_cli.planning.assumptions import for_p99
from carpool_sidecar.models import OTHER
from carpool_sidecar.tuning.rollback import Rollback

FIRST, SECOND, THIRD = (Parameters(max_batch=size) for size in (4, 8, 16))
POLICY = for_p99(0.05)


class Bench:
    """A Batcher whose counters say what a test wants, and the guard over it."""

    def __init__(self, undecided=0) -> None:
        self.batcher = Batcher(FIRST, undecided=undecided)
        self.rollback = Rollback(self.batcher, self._put, logging.getLogger("test"))
        self.now = 100.0

    def _put(self, model, parameters):
        self.batcher.configure(parameters, self.now, model=model)

    def change(self, generation, policy=POLICY, **parameters):
        """Apply a change, as Control does."""
        self.rollback.begin(policy, generation)
        for model, named in parameters.items():
            self._put(model, self.rollback.allowed(model, named))
        self.rollback.applied(self.now)

    def serve(self, model, seconds, missing=0.0, *, reason=LATE, each=100, stalled=False):
        for _ in range(round(2 * seconds)):
            counters = self.batcher.model(model).counters
            late = round(each * missing)
            counters.rows += each
            counters.hits += each - late
            counters.misses[reason] = counters.misses.get(reason, 0) + late
            self.now += 0.5
            self.rollback.observe(self.now, stalled=stalled)

    def running(self, model):
        return self.batcher.model(model).parameters


@pytest.fixture
def bench():
    bench = Bench()
    bench.batcher.model("m")
    bench.change(1, m=FIRST)
    bench.serve("m", 15)
    return bench


@pytest.mark.parametrize("reason", [LATE, Refused.LATE, Refused.EXPIRED, Refused.QUEUE_FULL])
def test_parameters_that_miss_the_slo_are_rolled_back_and_reported(bench, reason, caplog):
    bench.change(2, m=SECOND)
    bench.serve("m", 1, missing=0.3, reason=reason)
    assert bench.running("m") == FIRST
    told = bench.rollback.rolled_back["m"]
    assert (told.model, told.generation, told.rejected) == ("m", 2, SECOND)
    assert (told.back_to, told.back_to_generation) == (FIRST, 1)
    assert (bench.rollback.running, bench.rollback.counts) == (1, {"m": 1})
    assert (caplog.records[-1].model, caplog.records[-1].generation) == ("m", 2)


def test_what_is_taken_back_stays_so_while_changes_name_it_and_until_they_name_another(bench):
    bench.change(2, m=SECOND)
    bench.serve("m", 1, missing=0.3)
    bench.change(3, m=SECOND)  # signed anew
    bench.serve("m", 15)
    assert (bench.running("m"), bench.rollback.running) == (FIRST, 1)
    bench.change(4, m=THIRD)
    assert (bench.running("m"), bench.rollback.running, bench.rollback.rolled_back) == (THIRD, 4, {})
    bench.serve("m", 1, missing=0.3)
    assert (bench.running("m"), bench.rollback.rolled_back["m"].back_to_generation) == (FIRST, 1)
    bench.change(5, m=FIRST)  # as the operator does that heard of it
    assert (bench.running("m"), bench.rollback.running, bench.rollback.rolled_back) == (FIRST, 5, {})
    bench.change(6, m=SECOND)
    assert bench.running("m") == SECOND, "another load may have come: it may be tried again"


def test_it_goes_back_to_what_first_calls_led_to():
    bench = Bench(undecided=8)
    lane = bench.batcher.model("m")
    bench.change(1)
    for calls in (1, 1, 2, 2, 2, 2):
        lane.first_calls.answered(calls, 0.01)
        lane.follow(lane.first_calls)
    bench.serve("m", 15)
    bench.rollback.begin(POLICY, 2)
    bench.batcher.configure(FIRST, bench.now, model="m", undecided=8)  # as a document that names no model
    bench.rollback.applied(bench.now)
    ran = lane.in_force
    bench.change(3, m=SECOND)

    bench.serve("m", 1, missing=0.3)

    assert (ran.max_in_flight, ran.pass_through) == (4, True)
    assert bench.running("m") == ran
    told = bench.rollback.rolled_back["m"]
    assert (told.rejected, told.back_to, told.back_to_generation) == (SECOND, ran, 2)


def test_models_are_judged_one_by_one(bench):
    bench.batcher.model("n")
    bench.change(2, m=FIRST, n=FIRST)
    bench.serve("n", 15)
    bench.change(3, m=SECOND, n=SECOND)
    bench.serve("n", 15)
    bench.serve("m", 1, missing=0.3)
    assert (bench.running("m"), bench.running("n")) == (FIRST, SECOND)
    assert bench.rollback.running == 2


@pytest.mark.parametrize("failed", [{"reason": FAILED}, {"stalled": True}])
def test_failures_and_pauses_of_the_host_are_not_held_against_parameters(bench, failed):
    bench.change(2, m=SECOND)
    bench.serve("m", 10, missing=0.5, **failed)
    assert bench.running("m") == SECOND


def test_under_another_policy_nothing_is_known_to_be_good(bench):
    bench.change(2, for_p99(0.02), m=SECOND)
    bench.serve("m", 10, missing=0.5)
    assert bench.running("m") == SECOND


def test_a_model_that_was_replaced_is_judged_anew(bench):
    bench.change(2, m=SECOND)
    bench.rollback.forget("m")
    bench.serve("m", 10, missing=0.5)
    assert bench.running("m") == SECOND


def test_what_comes_from_the_file_is_not_watched_over(bench):
    bench.rollback.end()
    bench._put("m", SECOND)
    bench.serve("m", 10, missing=0.5)
    assert bench.running("m") == SECOND


def test_a_model_that_is_forgotten_and_comes_again_begins_anew(bench):
    bench.batcher.forget("m")
    bench.serve("m", 0.5, missing=1.0)
    bench.change(2, m=SECOND)
    bench.serve("m", 10, missing=0.5)
    assert bench.running("m") == SECOND


def test_models_without_room_are_not_judged_together(bench):
    bench.change(2, **{OTHER: FIRST})
    bench.serve(OTHER, 15)
    bench.change(3, **{OTHER: SECOND})
    bench.serve(OTHER, 10, missing=0.5)
    assert bench.running(OTHER) == SECOND


def test_what_was_late_before_a_change_is_not_of_it(bench):
    counters = bench.batcher.model("m").counters
    counters.misses[LATE] = counters.misses.get(LATE, 0) + 1000
    bench.change(2, m=SECOND)
    bench.serve("m", 1)
    assert bench.running("m") == SECOND
