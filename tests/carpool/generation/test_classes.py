"""Classes of requests with targets of their own, before one engine."""

from __future__ import annotations

from random import Random

from engines import LLAMA, SLO, gate

from carpool.generation.engine import Engine
from carpool.generation.profiles import EngineProfile
from carpool.generation.requests import Admit, ClassTargets, Request, Slo
from carpool.generation.simulation import Arrival, Simulation

GOLD = ClassTargets(ttft=1.0, tpot=0.03, later=-1.0)
RELAXED = ClassTargets(ttft=10.0, tpot=0.2, later=8.0)
PROFILE = EngineProfile(name="a100", source="rounded", kv_tokens=400_000, step=LLAMA)


def admitted(actions):
    return [action.request.key for action in actions if isinstance(action, Admit)]


def running(machine, count, slo, *, first=0, now=0.0):
    """Let requests with no prompts to speak of decode."""
    for key in range(first, first + count):
        each = Request(key, now, 1, targets=slo)
        assert admitted(machine.arrive(each, now)) == [key]
        machine.first_token(each, now)


def held(machine, slo, now=0.0):
    """How many are admitted until one waits."""
    count = 0
    while admitted(machine.arrive(Request(10_000 + count, now, 1, targets=slo), now)):
        count += 1
    return count


def test_a_class_with_a_shorter_target_closes_the_gate_earlier():
    # (50 - 11.5) ms / 39 us, and (30 - 11.5) ms / 39 us, over the margin.
    assert held(gate(), GOLD) < 0.6 * held(gate(), None) < 0.6 * held(gate(), RELAXED)


def test_while_one_of_it_is_with_the_engine_nobody_else_slows_it():
    machine = gate()
    running(machine, 1, GOLD)
    with_gold = held(machine, None)
    assert with_gold < 0.6 * held(gate(), None)
    machine = gate()
    gold = Request(0, 0.0, 1, targets=GOLD)
    machine.arrive(gold, 0.0)
    machine.first_token(gold, 0.0)
    machine.ended(gold, 0.0, 1)
    assert held(machine, None) > 1.5 * with_gold, "it has left"


def test_those_without_a_class_are_protected_from_a_relaxed_one():
    machine = gate()
    running(machine, 1, None)
    assert held(machine, RELAXED) <= held(gate(), None)


def test_the_next_is_whose_first_token_is_due_first():
    machine = gate()
    running(machine, held(gate(), None), None)
    requests = [Request(2000, 0.0, 1), Request(2001, 0.1, 1, targets=RELAXED), Request(2002, 0.2, 1, targets=GOLD)]
    for each in requests:
        assert not admitted(machine.arrive(each, each.arrival))
    assert machine._interactive.head(0.0).key == 2002
    assert machine.wake_at(0.2) < 1.2, "gold is given up first"


def load(rate, seconds, share, random):
    """Requests; the share ``share`` of them is gold."""
    now, key, arrivals = 0.0, 0, []
    while (now := now + random.expovariate(rate)) < seconds:
        slo = GOLD if random.random() < share else None
        arrivals.append(Arrival(Request(key, now, 600, targets=slo, tenant="gold" if slo else "all"), 150))
        key += 1
    return arrivals


def good(arrivals):
    """Shares of gold and of other requests in time, by the targets of each, once the gate has learned."""
    served = Simulation(arrivals, Engine(PROFILE, Random(1)), gate(), until=200.0).run().served
    shares = []
    for tenant, slo in (("gold", Slo(GOLD.ttft, GOLD.tpot)), ("all", SLO)):
        own = [each for each in served if each.tenant == tenant and 30 <= each.arrival < 120]
        shares.append(sum(each.good(slo) for each in own) / len(own))
    return shares


def test_each_class_meets_its_targets_and_a_class_that_is_not_asked_for_would_not():
    gold, others = good(load(9.0, 130.0, 0.2, Random(2)))
    assert gold > 0.97
    assert others > 0.97
    # The same requests, and nobody says that they are gold: what is gold is judged by its targets all the same.
    unnamed = load(14.0, 130.0, 0.2, Random(2))
    named = load(14.0, 130.0, 0.2, Random(2))
    for each in unnamed:
        each.request.targets = None
    assert good(named)[0] > good(unnamed)[0] + 0.2
