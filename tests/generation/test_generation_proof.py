"""The proof of the gate lies in benchmarks/, which is no package of the project's."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import click
import pytest
from msgspec.structs import replace

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from evidence import limits  # noqa: E402 - its folder has to be on the path
from generation import __main__ as command  # noqa: E402 - likewise
from generation import bound, figures, world  # noqa: E402 - likewise
from generation.figures import Played, Row  # noqa: E402 - likewise
from generation.rivals import Aimd  # noqa: E402 - likewise
from generation.world import PROFILES, scenarios  # noqa: E402 - likewise

from carpool.generation.engine import Engine, Sequence  # noqa: E402 - likewise
from carpool.generation.gate import Limits  # noqa: E402 - likewise
from carpool.generation.profiles import EngineProfile, Linear  # noqa: E402 - likewise
from carpool.generation.requests import Request, Slo  # noqa: E402 - likewise
from carpool.policy.generation import Generation  # noqa: E402 - likewise
from carpool_cli.streams.loads import Lengths, capacity  # noqa: E402 - likewise
from carpool_cli.streams.rules import Cap  # noqa: E402 - likewise

PROFILE = EngineProfile(
    name="test",
    source="rounded",
    kv_tokens=400_000,
    step=Linear(base=0.0115, sequence=39e-6, kv_token=77e-9, prompt_token=55e-6),
)
SLO = Slo(2.0, 0.05)


def played(goodput, after=None):
    return Played(goodput, goodput, 0.0, 0.1, 1.0, 0.02, 0.05, 0, after)


def row(name, ours, best, none=0.0, seed=1, after=None):
    reference = None if after is None else 10.0
    rules = {"carpool": played(ours, after), "best cap": played(best, reference), "no gate": played(none)}
    return Row(name, seed, 8.0, 10.0, rules, 64, 1.0)


def test_there_are_enough_scenarios_each_with_a_profile_and_a_name_of_its_own():
    found = scenarios()
    assert len(found) >= 24
    assert len({each.name for each in found}) == len(found)
    assert all((PROFILES / f"{each.profile}.json").exists() for each in found)


def test_every_figure_has_a_limit():
    rows = [row(each.name, 9.0, 10.0, after=9.5) for each in scenarios()]
    known = limits(BENCHMARKS / "generation" / "limits.json")
    found = {figure.name: figure.value for figure in command.summary(scenarios(), rows)}
    assert set(found) <= set(known)
    assert found["goodput, median"] == found["goodput, worst"] == 0.9
    assert found["30 s after a change, worst"] == 0.95


def test_overload_is_compared_with_the_highest_of_lower_loads():
    rows = [row("8b-a100-0.7", 5.0, 5.0), row("8b-a100-1.3", 8.0, 10.0, 2.0), row("8b-a100-2", 6.0, 5.0)]
    found = {figure.name: figure.value for figure in command.summary(scenarios(), rows)}
    assert found["overload 1.3x, worst"] == 0.8
    assert found["overload 1.3x without a gate, most"] == 0.2
    assert found["overload 2x, worst"] == 0.6


def test_a_scenario_at_1_3_offers_1_3_times_what_its_own_requests_need(monkeypatch):
    # A quarter of an hour of short answers, then long ones: by the mean of both, the first is no overload.
    pairs = [(200, 50)] * 8000 + [(1000, 400)] * 8000
    monkeypatch.setattr(world, "lengths_of", lambda kind: Lengths(pairs, kind))
    scenario = next(each for each in scenarios() if each.name == "8b-a100-1.3")
    built = world.build(scenario, 0)
    played = [(each.request.prompt_tokens, each.output_tokens) for each in built.arrivals()]
    offered = len(played) / scenario.seconds
    assert 1.2 < offered / capacity(built.profile, Lengths(played, ""), scenario.slo).rate < 1.4
    assert offered / capacity(built.profile, Lengths(pairs, ""), scenario.slo).rate > 2  # what it was before


def test_the_gate_alone_is_played_again_beside_others_that_are_as_they_were(monkeypatch):
    monkeypatch.setattr(world, "lengths_of", lambda kind: Lengths([(600, 150), (200, 50)] * 500, kind))
    scenario = next(each for each in scenarios() if each.name == "8b-a100-1.3")
    built = world.build(replace(scenario, phases=[(10.0, 1.3)]), 0)
    best = figures.played(built, figures.simulate(built, Cap(32, scenario.slo, built.profile)))
    rules = {"carpool": played(0.0), "best cap": best, "no gate": played(0.5)}
    before = Row(scenario.name, 0, built.capacity.rate, figures.offered(built), rules, 32, 1.0)
    after = figures.again(built, before)
    assert after.rules["carpool"].goodput > 1.0
    assert after == replace(before, rules=rules | {"carpool": after.rules["carpool"]}, bound=bound.most(built))
    for stale in (replace(before, cap=16), replace(before, offered=1.0), replace(before, capacity=1.0)):
        with pytest.raises(click.ClickException, match="make generation"):
            figures.again(built, stale)


def test_the_gate_plays_what_policies_have_by_default():
    assert Limits().kv_budget_percent == Generation().kv_budget_percent


def test_aimd_lowers_its_cap_where_tokens_are_late_and_raises_it_while_requests_wait():
    rule = Aimd(SLO, PROFILE)
    requests = [Request(key, 0.0, 10) for key in range(30)]
    for each in requests:
        rule.arrive(each, 0.0)
    for each in requests[:16]:
        rule.first_token(each, 0.0)
    # 16 tokens in 20 ms, then in 100 ms.
    for i in range(1, 60):
        rule.progress(0.02 * i, 16)
    assert rule.most == 17
    for i in range(1, 13):
        rule.progress(1.2 + 0.1 * i, 16)
    assert rule.most < 17


def clairvoyant(built, share):
    """Return the world without the requests of its tenant that cost the engine most: those a rule would refuse."""
    costs = bound.work_of(built, built.profile.step).cost
    highest = sorted(costs)[int(share * len(costs)) - 1]
    kept = {key for key, cost in enumerate(costs) if cost <= highest}

    class Chosen(world.World):
        def arrivals(self, *, flood=True):
            return [each for each in world.World.arrivals(self, flood=flood) if each.request.key in kept]

    return Chosen(*built)


@pytest.mark.parametrize("changes", [{}, {"noise": 0.2}, {"slowdowns": ((0, 1.5), (30, 1.0))}, {"stalls": ((5, 10),)}])
def test_no_rule_exceeds_the_bound_even_one_that_knows_what_requests_cost(monkeypatch, changes):
    monkeypatch.setattr(world, "lengths_of", lambda kind: Lengths([(1200, 200), (200, 40), (3000, 60)] * 500, kind))
    scenario = next(each for each in scenarios() if each.name == "8b-a100-2")
    built = world.build(replace(scenario, phases=[(60.0, 2.0)], **changes), 0)
    most = bound.most(built)
    found = [
        figures.played(part, figures.simulate(part, Cap(cap, scenario.slo, built.profile))).goodput
        for part in (clairvoyant(built, share) for share in (0.34, 0.67, 1.0))
        for cap in (16, 48, 96)
    ]
    # Near enough to say something, and never below.
    assert 0.6 * most < max(found) <= most < figures.offered(built)


def test_the_bound_of_requests_that_need_the_whole_engine_is_what_fits(monkeypatch):
    # 10,000 prompt tokens take 0.55 s of an A100 each; 60 s have room for some 109, and for those that end after it.
    monkeypatch.setattr(world, "lengths_of", lambda kind: Lengths([(10_000, 2)] * 100, kind))
    scenario = next(each for each in scenarios() if each.name == "8b-a100-2")
    built = world.build(replace(scenario, phases=[(60.0, 2.0)], noise=0.0), 0)
    each = built.profile.step.prompt_token * 10_000
    assert 60 / each - 2 < 60 * bound.most(built) <= 62.1 / each
    assert bound.most(built) < 0.8 * figures.offered(built)


def test_a_request_takes_no_less_than_its_part_of_an_engine_that_is_full_all_the_time(monkeypatch):
    # As many as may decode at once, of the same lengths, all prompts before: no step has room for another sequence.
    monkeypatch.setattr(world, "lengths_of", lambda kind: Lengths([(8000, 400)] * 100, kind))
    built = world.build(next(each for each in scenarios() if each.name == "8b-a100-2"), 0)
    built = built._replace(profile=replace(built.profile, prefill="first", max_running=32))
    engine, now = Engine(built.profile, Random(0)), 0.0
    for key in range(32):
        engine.submit(Sequence(key, 8000, 400))
    while (progress := engine.run(now)) is not None:
        now = progress.end
    least = 32 * bound.work_of(built, built.profile.step).cost[0]
    # Steps of prompts have a base of their own, and read what they cached.
    assert 0.95 * now < least < now


def test_measured_tables_have_no_bound(monkeypatch):
    monkeypatch.setattr(world, "lengths_of", lambda kind: Lengths([(600, 150)] * 100, kind))
    assert bound.most(world.build(next(each for each in scenarios() if "table" in each.profile), 0)) is None
