"""`python benchmarks/settling.py`: how a large cluster settles after a start, in virtual time, and what that costs.

One policy for each of the loads in `virtual_pods.py`, five pods each, with no model known: ten minutes of passes, two
seconds apart. Nothing may change after the first five. When anything changes is logic, and the same on every machine.
CPU is measured. `whole_operator.py` runs the same fleet by the clock. Exit code 1: beyond a limit.
"""

from __future__ import annotations

import argparse
import sys
from time import process_time
from typing import TYPE_CHECKING

from evidence import Figure, conclude
from fleet import HERE, LIMITS, PODS, Fleets
from virtual_pods import INTERVAL, LOADS

from carpool_operator.controller import Controller

if TYPE_CHECKING:
    from carpool_operator.api.model import Outcome, View

RESULTS = HERE / "results" / "settling.json"

WITHIN = 300.0
"""Seconds from the start in which a policy is to have settled."""

LOOKED = 600.0
"""Seconds that are looked at: what has come to rest may explore once more."""


class Timed(Controller):
    """A controller that counts what its decisions cost, and when it last changed anything."""

    cost = 0.0
    changes = 0
    last = 0.0

    def step(self, view: View) -> Outcome:
        """Decide."""
        begun = process_time()
        outcome = super().step(view)
        if view.now <= WITHIN:
            self.cost += process_time() - begun
        if outcome.documents:
            self.changes, self.last = self.changes + 1, view.now
        return outcome


def main() -> int:
    """Measure, print, and keep the results."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    fleets = Fleets(len(LOADS), Timed)
    for _ in range(int(LOOKED / INTERVAL)):
        fleets.once()
    last, cost, calm = {}, {}, 0
    for load, one in zip(LOADS, fleets.controllers, strict=True):
        name = f"{load:g} requests/s and pod"
        settled = one.last <= WITHIN
        calm += settled
        last[name], cost[name] = one.last, one.cost
        print(
            f"{name}: {'settled' if settled else 'not settled'}, {one.changes} documents, the last one after "
            f"{one.last:.0f} s; {one.cost:.2f} s of CPU"
        )
    figures = [
        Figure("settling, policies", calm / len(LOADS), len(LOADS), last),
        Figure("settling, CPU", sum(cost.values()) / len(LOADS), len(LOADS), {**cost, "pods of each": float(PODS)}),
    ]
    return conclude(figures, LIMITS, RESULTS)


if __name__ == "__main__":
    sys.exit(main())
