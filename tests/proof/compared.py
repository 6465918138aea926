"""Played in a process of its own: who has imported Carpool's sources can't take the machine code as well."""

from __future__ import annotations

from proof import experiments, oracle
from proof import scenario as suite
from proof.world import Stretch, play


def played(name, contender):
    """Return what every request of half a minute came to, and what was decided meanwhile."""
    scenario = next(each for each in suite.load_all() if each.name == name)
    capacity = oracle.capacity(scenario)
    course = [Stretch(20.0, 0.3 * capacity), Stretch(10.0, 1.2 * capacity)]
    outcome = play(scenario, experiments.CONTENDERS[contender].maker, course, 1).outcome
    return outcome.latencies, outcome.ends, outcome.changes
