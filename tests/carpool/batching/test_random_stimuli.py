"""Random stimuli in any order: the driver checks every action and all totals."""

from __future__ import annotations

from math import inf
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from machine import FAILURES, MODELS, Driver, estimate, random_parameters, random_request
from soak import soak

from carpool.batching.requests import Estimate, Fault, FaultKind
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters


class Riding(RuleBasedStateMachine):
    """Whatever happens, in whatever order: the driver's account and the Batcher's agree."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver()

    @rule(random=st.randoms(use_true_random=False), count=st.integers(1, 4))
    def arrive(self, random: Random, count: int) -> None:
        for _ in range(count):
            self.driver.arrive(**random_request(random, self.driver.now))

    @rule(
        rows=st.integers(1, 40),
        key=st.sampled_from("kl"),
        patience=st.sampled_from([0.01, inf]),
        mergeable=st.booleans(),
        poison=st.sampled_from([None, None, None, FaultKind.ITEM, FaultKind.ROWS]),
    )
    def arrive_one(self, rows: int, key: str, patience: float, mergeable: bool, poison: FaultKind | None) -> None:
        now = self.driver.now
        self.driver.arrive(
            key=key, model="a", rows=rows, due=now + 0.02, deadline=now + patience, mergeable=mergeable, size=rows,
            payload=poison,
        )  # fmt: skip

    @rule(index=st.integers(0), failure=st.one_of(st.none(), st.sampled_from(FAILURES)), stalled=st.booleans())
    def complete(self, index: int, failure: Fault | None, stalled: bool) -> None:
        if self.driver.calls:
            calls = list(self.driver.calls)
            self.driver.complete(calls[index % len(calls)], failure, stalled=stalled)

    @rule(index=st.integers(0))
    def cancel(self, index: int) -> None:
        if self.driver.live:
            live = list(self.driver.live)
            self.driver.cancel(live[index % len(live)])

    @rule(seconds=st.sampled_from([0.0, 0.001, 0.01, 1.0]), on_time=st.booleans())
    def time_passes(self, seconds: float, on_time: bool) -> None:
        (self.driver.advance if on_time else self.driver.skip)(seconds)

    @rule(random=st.randoms(use_true_random=False), model=st.sampled_from([None, *MODELS]))
    def configure(self, random: Random, model: str | None) -> None:
        self.driver.configure(random_parameters(random), model)

    @rule(
        model=st.sampled_from(MODELS),
        belief=st.sampled_from([None, estimate(), estimate(0.001, 0.004), estimate(executors=3)]),
        shed_slo=st.booleans(),
    )
    def learn(self, model: str, belief: Estimate | None, shed_slo: bool) -> None:
        self.driver.learn(model, belief, shed_slo=shed_slo)

    @rule()
    def restart(self) -> None:
        self.driver.restarted()

    @rule()
    def drain(self) -> None:
        self.driver.obey(self.driver.batcher.drain(self.driver.now))

    @invariant()
    def adds_up(self) -> None:
        self.driver.check()
        self.driver.check_totals()

    def teardown(self) -> None:
        self.driver.quiesce()
        self.driver.check_totals()


TestRiding = Riding.TestCase
TestRiding.settings = settings(
    max_examples=120, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize("seed", range(20))
def test_soak_in_small(seed: int) -> None:
    assert soak(seed, 1000).arrivals > 200


@pytest.mark.parametrize("seed", range(20))
def test_rule_8_whatever_happens_nobody_waits_for_a_stuck_model_beyond_the_due_time(seed: int) -> None:
    random = Random(seed)
    driver = Driver()
    driver.configure(
        Parameters(max_batch=2, max_wait=Duration(random.choice((0.0, 0.2))), max_in_flight=random.choice((1, 2)))
    )
    for _ in range(300):
        match random.randrange(6):
            case 0 | 1:
                slo = random.choice((0.001, 0.1, 0.5, 2.0))
                driver.arrive(
                    key=random.choice("kj"), model=random.choice(("m", "m", "n")), due=driver.now + slo,
                    deadline=driver.now + 20.0,
                )  # fmt: skip
            case 2 | 3:
                driver.advance(random.choice((0.01, 0.3, 1.5)))
            case 4 if driver.calls:
                driver.complete(random.choice(list(driver.calls)))
            case 5:
                driver.learn("m", estimate(), shed_slo=random.random() < 0.7)
        driver.check()
    driver.quiesce()
