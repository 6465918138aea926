"""What the core costs: CPU of the Batcher for each request, of the simulator, and of a tuner's decision."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from evidence import Figure, Skipped, least

from carpool import arrivals
from carpool.batching import Batcher
from carpool.chain import greedy
from carpool.latency import ServiceTime
from carpool.policy import BatchingPolicy, Duration, Parameters, for_p99
from carpool.riding import Batch, Estimate, Finish, Request
from carpool.simulation import Device, Simulation, linear
from carpool.statistics import Stats
from carpool.tuner import Observation, Tuner
from carpool.twin import INTERVAL

FIXED, PER_ROW = 0.005, 0.0005
SLO = 0.050
TRIALS = 30


def ride(requests: int) -> float:
    """Take requests through a Batcher (arrive, dispatch, complete, count); return CPU seconds for each.

    1,667 requests/s on a device with t(b) = 5 + 0.5 b ms: batches of up to 32, one in flight.
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
                    counters = action.batch.lane.counters
                    for rider in action.requests:
                        counters.answered(rider.arrived, rider.due, landed, True)
    return (time.process_time() - start) / requests


def batcher() -> list[Figure]:
    """Measure the Batcher."""
    return [Figure("Batcher", least(lambda: ride(10_000), TRIALS) * 1e6, TRIALS)]


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
                capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "0"},
            )  # fmt: skip
        found = re.search(r"Collected : (\d+)", run.stderr)
        assert found is not None  # noqa: S101 - for the type checker: callgrind ends with it
        return int(found[1])

    few, many = 500, 2500
    # Compiles what was edited since: else the first count would hold that.
    subprocess.run([sys.executable, str(Path(__file__)), "1"], check=True)
    return [Figure("Batcher instructions", (count(many) - count(few)) / (many - few), 1)]


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


def decision() -> list[Figure]:
    """Measure the dearest decision on the way from knowing nothing to a load of 1,000 requests/s, and the closed form.

    Each decision of the same replayed observations is timed in several runs; of its times the least counts.
    """
    policy = for_p99(SLO)
    rate = 1000.0
    runs = 5
    dearest: dict[str, float] = {}
    for executors in (1, 4):
        observed = observations(policy, rate * executors, executors)
        costs = [
            min(each) for each in zip(*(steps(policy, observed) for _ in range(runs)), strict=True)
        ]  # one list a run, so: by decision
        dearest[f"{executors} executors"] = max(costs) * 1e3
    service = ServiceTime.measured({rows: FIXED + PER_ROW * rows for rows in range(1, 65)})

    def closed() -> float:
        start = time.process_time()
        for size in (1, 2, 4, 8, 16, 32, 64):
            greedy(rate, service, size, SLO)
        return (time.process_time() - start) / 7

    return [
        Figure("decision", max(dearest.values()), runs, dearest),
        Figure("closed form", least(closed, TRIALS) * 1e3, TRIALS),
    ]


def observations(policy: BatchingPolicy, rate: float, executors: int) -> list[Observation]:
    """Record what a tuner is told in 60 simulated seconds, with the tuner in the loop."""
    tuner = Tuner(policy)
    recorded: list[Observation] = []
    last = Stats(at=0.0)

    def observe(now: float, stats: list[Stats]) -> None:
        nonlocal last
        delta, last = stats[0].since(last), stats[0]
        if "" in delta.models:
            recorded.append(Observation(now=now, seconds=INTERVAL, stats=delta.models[""]))
            tuner.step(recorded[-1])

    times = list(arrivals.until(arrivals.Poisson(rate), 60.0, Random(2)))
    device = Device(linear(FIXED, PER_ROW), executors=executors)
    Simulation(times, device, slo=SLO, parameters=Parameters(max_in_flight=executors)).every(INTERVAL, observe).run()
    return recorded


def steps(policy: BatchingPolicy, observed: list[Observation]) -> list[float]:
    """Replay observations to a new tuner; return the CPU seconds of each decision."""
    tuner = Tuner(policy)
    costs = []
    for observation in observed:
        start = time.process_time()
        tuner.step(observation)
        costs.append(time.process_time() - start)
    return costs


if __name__ == "__main__":
    ride(int(sys.argv[1]))  # what `instructions` counts
