"""Simulated fleets whose operator is upgraded."""

from __future__ import annotations

import pytest
from fleets import World, spec
from msgspec.structs import replace

from carpool.policy.spec import PassThrough, PassThroughMode, Tuning, TuningMode
from carpool_operator.delivery.documents import sidecar_policy

NEVER = PassThrough(mode=PassThroughMode.NEVER)
MODES = [{"pass_through": NEVER}, {"tuning": Tuning(mode=TuningMode.HOLD)}]


def upgraded(**modes):
    """A fleet that an operator began whose documents had no modes, and the operator of today in its place."""
    world = World(spec(**modes), pods=2)
    world.run(0, 10)
    change = world.durable
    older = replace(change, policy=replace(change.policy, tuning=Tuning(), pass_through=PassThrough()))
    world.durable = older
    for each in world.pods:
        each.change = older
    world.log.clear()
    world.restart_operator()
    return world


@pytest.mark.parametrize("modes", MODES)
def test_an_upgrade_of_the_operator_changes_nothing_that_runs(modes):
    """First calls go on under documents without modes, and would end with these: at one call at a time."""
    world = upgraded(**modes)
    world.run(0, 30)
    assert world.documents() == []
    world.restart_operator()
    world.run(0, 30)
    assert world.documents() == []


def test_after_an_upgrade_the_modes_are_sent_once_all_models_are_named():
    world = upgraded(pass_through=NEVER)
    world.run(300, 60)
    first, *others = world.documents()
    assert "" in first.change.parameters, "what was decided ends first calls"
    assert others[-1].change.policy.pass_through == NEVER


@pytest.mark.parametrize("modes", [{}, {"pass_through": NEVER}])
def test_after_an_upgrade_mode_recommend_is_sent_at_once(modes):
    """Recommend ends no first calls. If sidecars got Apply, they would send requests of their own."""
    world = upgraded(tuning=Tuning(mode=TuningMode.RECOMMEND), **modes)
    world.run(300, 60)
    world.restart_operator()
    world.run(300, 60)
    (document,) = world.documents()
    assert document.change.policy.tuning.mode is TuningMode.RECOMMEND
    assert document.change.policy.pass_through == PassThrough(), "nobody decides, so first calls go on"
    world.edit(spec(0.04, tuning=Tuning(mode=TuningMode.RECOMMEND), **modes))
    world.run(0, 10)
    assert world.documents()[-1].change.policy.pass_through == modes.get("pass_through", PassThrough())


def test_after_an_upgrade_mode_hold_is_sent_when_no_sidecar_is_older():
    """Older ones end first calls by it."""
    world = upgraded(tuning=Tuning(mode=TuningMode.HOLD))
    first, second = world.pods
    first.pod = replace(first.pod, current=True)
    world.run(300, 60)
    assert world.documents() == []
    second.pod = replace(second.pod, current=True)
    world.run(300, 60)
    (document,) = world.documents()
    assert document.change.policy.tuning.mode is TuningMode.HOLD
    first.pod = replace(first.pod, current=False)
    world.run(300, 60)
    assert len(world.documents()) == 1, "what was said is not taken back"


def test_what_was_edited_while_the_workload_was_away_is_no_upgrade():
    world = World(spec(), pods=2)
    world.run(0, 10)
    workload, pods = world.workload, world.pods
    world.restart_operator()
    world.workload, world.pods = None, []
    world.edit(spec(pass_through=NEVER))
    world.step(world.now + 1, [])
    assert world.status["observedGeneration"] == world.policy.generation
    world.workload, world.pods = workload, pods
    world.run(0, 60)
    assert world.documents()[-1].change.policy.pass_through == NEVER


@pytest.mark.parametrize("modes", MODES)
def test_after_an_upgrade_an_edited_policy_is_sent_as_it_is(modes):
    world = upgraded(**modes)
    world.run(0, 10)
    world.edit(spec(0.04, **modes))
    world.run(0, 10)
    (document,) = world.documents()
    assert document.change.policy == sidecar_policy(spec(0.04, **modes).policy())


def test_what_was_edited_while_no_operator_ran_is_no_upgrade():
    world = World(spec(), pods=2)
    world.run(0, 10)
    world.restart_operator()
    world.edit(spec(pass_through=NEVER))
    world.run(0, 10)
    assert world.documents()[-1].change.policy.pass_through == NEVER
