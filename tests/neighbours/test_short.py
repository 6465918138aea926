"""The short form of `make neighbours`: the worst of each kind, on real sockets, for seconds.

Nothing here is judged by the clock: answers are counted, memory is the kernel's peak, `/livez` is judged by CPU time.
"""

from __future__ import annotations

import pytest
import uvloop
from neighbours import trials, verdict
from neighbours.catalogue import NEIGHBOURS

WARM_UP = 1.5

SECONDS = {
    "none": 1.0,
    "inputs": 1.0,
    "bomb-keys": 1.0,
    "poison-422-3": 2.0,
    "poison-500-10": 2.0,
    "short-3": 2.0,
    # Four seconds of requests are more than the queue takes, so that a blocked slot is seen.
    "hanging": 4.0,
    "streams": 4.0,
    "slow-loris": 4.0,
    "flood": 1.0,
    "large": 2.0,
}
"""How long each neighbour acts: 45 s in all, starts included."""

pytestmark = pytest.mark.real


@pytest.mark.parametrize("name", SECONDS)
def test_healthy_callers_pay_nothing(name):
    neighbour = next(each for each in NEIGHBOURS if each.name == name)
    seen = []
    while True:
        seen.append(uvloop.run(trials.behind_sidecar(neighbour, SECONDS[name], warm_up=WARM_UP)))
        row = verdict.row(neighbour, seen, None, None)
        # On a machine that stands still a neighbour may not get to anything.
        acted = any(each.theirs for each in seen) or name == "none"
        if len(seen) == verdict.TRIALS or (acted and not verdict.only_noise(row)):
            break
    assert acted, "the neighbour did nothing"
    assert row.sidecar.ok > 0
    broken = verdict.violations(row)
    assert not broken, "\n".join(broken)
