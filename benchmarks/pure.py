"""CPU cost of the core: of the Batcher for each request, of the simulator, and of a tuner's decision."""

from __future__ import annotations

import copy
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from operator import itemgetter
from pathlib import Path
from random import Random
from typing import NamedTuple

from chain import greedy
from evidence import Figure, Skipped, least

from carpool.batching.batcher import Batcher
from carpool.batching.counters import Stats
from carpool.batching.requests import Batch, Estimate, Finish, Request
from carpool.exchange.decision import Observation
from carpool.learning import arrivals
from carpool.learning.latency_model import ServiceTime
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.simulation.outcome import Setting
from carpool.simulation.simulator import Arrival, Device, Simulation, linear
from carpool.tuning.tuner import INTERVAL, Tuner
from carpool_cli.planning.assumptions import for_p99

FIXED, PER_ROW = 0.005, 0.0005
SLO = 0.050
TRIALS = 30


def portion(requests: int) -> float:
    """Take requests through a Batcher (arrive, dispatch, complete, count); return CPU seconds for each.

    1,667 requests/s on a device with batch latency 5 + 0.5 b ms: batches of up to 32, one in flight.
    """
    batcher = Batcher(Parameters(max_batch=32, max_wait=Duration(0.0), max_in_flight=1))
    times = tuple(FIXED + PER_ROW * rows for rows in range(65))
    batcher.learn("m", Estimate(times, times), 0.0)
    key = ("v1", "m")
    now = 0.0
    flying: list[tuple[float, Batch]] = []
    start = time.process_time()
    for _ in range(requests):
        now += 0.0006
        request = Request(key=key, arrived=now, due=now + SLO, deadline=now + 10.0, model="m", size=200)
        flying += [(now + times[each.rows], each) for each in batcher.arrive(request, now) if isinstance(each, Batch)]
        while flying and flying[0][0] <= now:
            landed, batch = flying.pop(0)
            for action in batcher.complete(batch, landed):
                if isinstance(action, Batch):
                    flying.append((landed + times[action.rows], action))
                elif isinstance(action, Finish):
                    counters = action.batch.state.counters
                    for waiter in action.requests:
                        counters.answered(waiter.arrived, waiter.due, landed, True)
    return (time.process_time() - start) / requests


def batcher() -> list[Figure]:
    """Measure the Batcher."""
    return [Figure("Batcher", least(lambda: portion(10_000), TRIALS) * 1e6, TRIALS)]


def instructions() -> list[Figure]:
    """Count the Batcher's instructions for each request: the same on every run, whatever else the machine does."""
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise Skipped("valgrind is not installed (Debian: apt-get install valgrind)")

    def count(requests: int) -> int:
        with tempfile.NamedTemporaryFile(suffix=".callgrind") as out:
            command = [valgrind, "--tool=callgrind", f"--callgrind-out-file={out.name}"]
            run = subprocess.run(
                [*command, sys.executable, str(Path(__file__)), str(requests)],
                capture_output=True, text=True, check=True,
                env={"PYTHONHASHSEED": "0", "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
            )  # fmt: skip
        found = re.search(r"Collected : (\d+)", run.stderr)
        assert found is not None  # noqa: S101 - for the type checker: callgrind ends with it
        return int(found[1])

    few, many, trials = 500, 2500, 2
    # Twice, for the first may compile what was edited since.
    fewest, most = (min(count(requests) for _ in range(trials)) for requests in (few, many))
    return [Figure("Batcher instructions", (most - fewest) / (many - few), trials)]


def simulator() -> list[Figure]:
    """Measure the simulator at 90 % of what the device can serve with batches of 32."""
    rate = 0.9 * 32 / (FIXED + 32 * PER_ROW)
    times = arrivals.first(arrivals.Poisson(rate), 20_000, Random(1))
    device = Device(linear(FIXED, PER_ROW))

    def run() -> float:
        simulation = Simulation(times, device, slo=SLO, parameters=Parameters(max_batch=32), estimate=device.estimate())
        start = time.process_time()
        simulation.run()
        return (time.process_time() - start) / len(times)

    return [Figure("simulator", 1 / least(run, TRIALS), TRIALS)]


class Case(NamedTuple):
    """A load on a device, for which a tuner that knows nothing but the SLO has to decide."""

    process: arrivals.Fitted
    device: Device
    rows: int = 1


# Rates are about 70 % of what the devices can do with batches of 32.
POISSON = {
    "1 executor": Case(arrivals.Poisson(1000.0), Device(linear(FIXED, PER_ROW))),
    "4 executors": Case(arrivals.Poisson(4000.0), Device(linear(FIXED, PER_ROW), executors=4)),
}
OTHERS = {
    "gamma, CV 2": Case(arrivals.Gamma(1000.0, 2.0), Device(linear(FIXED, PER_ROW))),
    "noise, CV 0.2": Case(arrivals.Poisson(1000.0), Device(linear(FIXED, PER_ROW), cv=0.2)),
    "both, 3 rows, 4 executors": Case(
        arrivals.Gamma(1300.0, 2.0), Device(linear(FIXED, PER_ROW), executors=4, cv=0.2), rows=3
    ),
}
SIMULATED = 30.0
"""Seconds of load: the search of a cold start, and those that its steps bring."""

Moment = tuple[Tuner, Observation]
"""A tuner's state, and its next observation."""


def decision() -> list[Figure]:
    """Measure the dearest decision on the way from knowing nothing to a steady load, and one closed form.

    Of each case the decisions that took longest are taken again, the cases in turn; of a decision's times the least
    counts, and of the decisions the dearest.
    """
    repeats, longest = 8, 2
    moments = {name: dear(case, longest) for name, case in {**POISSON, **OTHERS}.items()}
    costs: dict[str, list[float]] = {name: [math.inf] * longest for name in moments}
    for _ in range(repeats):
        for name, of_case in moments.items():
            costs[name] = list(map(min, map(again, of_case), costs[name]))
    dearest = {name: max(of_case) * 1e3 for name, of_case in costs.items()}
    service = ServiceTime.measured({rows: FIXED + PER_ROW * rows for rows in range(1, 65)})
    sizes = (1, 2, 4, 8, 16, 32, 64)

    def closed() -> float:
        start = time.process_time()
        for size in sizes:
            greedy(1000.0, service, size, SLO)
        return (time.process_time() - start) / len(sizes)

    poisson, others = ({name: dearest[name] for name in kind} for kind in (POISSON, OTHERS))
    return [
        Figure("decision, Poisson", max(poisson.values()), repeats, poisson),
        Figure("decision, others", max(others.values()), repeats, others),
        Figure("closed form", least(closed, TRIALS) * 1e3, TRIALS),
    ]


def dear(case: Case, count: int) -> list[Moment]:
    """Let a tuner that knows nothing but the SLO tune a load; return the moments before its longest decisions."""
    tuner = Tuner(for_p99(SLO))
    decisions: list[tuple[float, Moment]] = []
    last = Stats(at=0.0)

    def observe(now: float, stats: list[Stats]) -> list[Setting] | None:
        nonlocal last
        delta, last = stats[0].since(last), stats[0]
        if "" not in delta.models:
            return None
        moment = (
            copy.deepcopy(tuner),
            Observation(
                now=now,
                seconds=INTERVAL,
                stats=delta.models[""],
                queued_rows=delta.queued_rows,
            ),
        )
        start = time.process_time()
        decision = tuner.step(moment[1])
        decisions.append((time.process_time() - start, moment))
        return [Setting(decision.parameters, decision.estimate, decision.shed_slo)]

    load = [Arrival(at, case.rows) for at in arrivals.until(case.process, SIMULATED, Random(2))]
    Simulation(load, case.device, slo=SLO, parameters=tuner.parameters).every(INTERVAL, observe).run()
    decisions.sort(key=itemgetter(0), reverse=True)
    return [moment for _, moment in decisions[:count]]


def again(moment: Moment) -> float:
    """Decide once more; return the CPU seconds."""
    tuner, observation = copy.deepcopy(moment)
    start = time.process_time()
    tuner.step(observation)
    return time.process_time() - start


if __name__ == "__main__":
    portion(int(sys.argv[1]))  # what `instructions` counts
