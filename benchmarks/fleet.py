"""`python benchmarks/fleet.py`: what deciding for a large cluster costs, in CPU of one core and in memory.

1,000 policies over 5,000 pods. Reports are made up at the network's edge, from simulated pods, and read as they come
over it: as JSON. A pass reads every pod and steps every controller; what it decides is delivered at once. The first
passes are the dearest: every model is seen for the first time, and searched for. Exit code 1: beyond a limit.
"""

from __future__ import annotations

import argparse
import resource
import sys
from pathlib import Path
from random import Random
from time import process_time
from typing import TYPE_CHECKING

from evidence import Figure, conclude
from msgspec.structs import replace

from carpool.batching.counters import ModelStats, Stats
from carpool.exchange import report as reports
from carpool.exchange.report import Lane, Queue, Report, Stalls
from carpool.learning.arrivals import Poisson, until
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.policy.spec import SLO, Latency
from carpool.simulation.simulator import Device, Simulation, linear
from carpool_operator.api.annotations import INJECT
from carpool_operator.api.model import Pod, Policy, Reading, Target, View, Workload
from carpool_operator.api.spec import PolicySpec, TargetRef
from carpool_operator.controller import Controller
from carpool_operator.tuning.assignment import assign

if TYPE_CHECKING:
    from carpool.exchange.change import Change
    from carpool.simulation.outcome import Setting

HERE = Path(__file__).parent
LIMITS = HERE / "limits.json"
RESULTS = HERE / "results" / "fleet.json"

PODS = 5
"""Of each policy."""

INTERVAL = 2.0
EPOCH = 1_790_000_000.0

LOADS = (20.0, 100.0, 200.0, 400.0, 700.0, 1000.0, 1300.0, 1500.0)
"""Requests per second of a pod; the device saturates at 1,700."""

SETTLED = 60
"""Passes until every fleet has gone where it goes, the quietest last; then the steady ones are measured."""

STEADY = 5


def main() -> int:
    """Measure, print, and keep the results of a whole run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", type=int, default=1000, metavar="N", help="default: 1000, and only that is kept")
    options = parser.parse_args()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    fleets = Fleets(options.policies)
    passes = []
    for number in range(SETTLED + STEADY):
        passes.append(fleets.once())
        print(f"pass {number + 1} took {passes[-1]:.2f} s of CPU", flush=True)
    dearest, steady = max(passes), min(passes[SETTLED:])
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    figures = [
        Figure("fleet, dearest pass", dearest, len(passes)),
        Figure("fleet, steady pass", steady, STEADY, {"documents": float(fleets.documents), "writes": fleets.writes}),
        Figure("fleet, memory", memory, 1, {"before": before, "policies": float(options.policies)}),
    ]
    return conclude(figures, LIMITS, RESULTS if options.policies == 1000 else None)


def profiles() -> list[list[ModelStats]]:
    """Count what a pod counts in one interval, at each load; several intervals each, so that no two are the same."""
    device = Device(times=linear(0.005, 0.0005), cv=0.05)
    every = []
    for load in LOADS:
        last, intervals = ModelStats(), []

        def observe(now: float, stats: list[Stats]) -> list[Setting] | None:
            nonlocal last
            earlier, now_stats = Stats(now - INTERVAL, models={"": last}), stats[0]
            if "" in now_stats.models:
                intervals.append(  # noqa: B023 - used within this turn of the loop
                    now_stats.since(earlier).models[""] if last.windows else now_stats.models[""]
                )
                last = now_stats.models[""]
            return None

        simulation = Simulation(
            until(Poisson(load), 12.0, Random(1)),
            device,
            slo=0.05,
            parameters=Parameters(max_batch=32, max_wait=Duration(0.01)),
        )
        simulation.every(INTERVAL, observe).run()
        every.append(intervals[2:])
    return every


class Fleets:
    """All policies, their pods, and who decides for them."""

    def __init__(self, policies: int) -> None:
        self.documents = 0
        """Published after all had settled."""
        self.writes = 0.0
        """Statuses written then."""
        self._profiles = profiles()
        self._policies = [_policy(number) for number in range(policies)]
        self._controllers = [Controller() for _ in range(policies)]
        self._told: list[dict[str, Change]] = [{} for _ in range(policies)]
        self._now = 0.0
        self._passes = 0

    def once(self) -> float:
        """Make one pass; returns the CPU seconds it took, without those of making the reports up."""
        self._now += INTERVAL
        self._passes += 1
        took = 0.0
        begun = process_time()
        owners = assign(self._policies)
        took += process_time() - begun
        for number, controller in enumerate(self._controllers):
            policy, told = self._policies[number], self._told[number]
            target = Target(policy.namespace, "Deployment", policy.name)
            pods = [_pod(target, index) for index in range(PODS)]
            bodies = {pod.uid: reports.encode(self._report(number, pod, told.get(pod.uid))) for pod in pods}
            begun = process_time()
            readings = {uid: Reading(self._now, reports.decode(body)) for uid, body in bodies.items()}
            view = View(
                now=self._now,
                wall=EPOCH + self._now,
                policy=policy,
                owners=owners,
                workloads={target: _workload(target)},
                pods={target: pods},
                readings=readings,
                refused={},
                missed={},
                told={},
            )
            outcome = controller.step(view)
            took += process_time() - begun
            for document in outcome.documents:
                told.update(dict.fromkeys(document.pods or [pod.uid for pod in pods], document.change))
            if self._passes > SETTLED:
                self.documents += len(outcome.documents)
                self.writes += outcome.status != policy.status
            self._policies[number] = replace(policy, status=outcome.status)
        return took

    def _report(self, number: int, pod: Pod, change: Change | None) -> Report:
        stats = Stats(self._now, models={"resnet": self.counted(number, self._passes)})
        generation = 0 if change is None else change.generation
        return Report(
            stats=stats,
            uptime_seconds=self._now,
            ready=True,
            readiness="ready",
            target=str(pod.target),
            generation=generation,
            running=generation,
            slo_seconds=0.05,
            queue=Queue(rows=0, in_flight=1, slots=1),
            lanes={
                "resnet": Lane(
                    parameters=Parameters(), pass_through=False, queued_requests=0, cap=32, quarantined=False
                )
            },
            stalls=Stalls(0, 0.0),
        )

    def counted(self, number: int, passes: int) -> ModelStats:
        """Add the intervals of so many passes up: each profile's in turn, the same again when they are over."""
        intervals = self._profiles[number % len(self._profiles)]
        rounds, rest = divmod(passes, len(intervals))
        times = [rounds + (index < rest) for index in range(len(intervals))]
        total = ModelStats(durations=[0] * len(intervals[0].durations))
        cells: dict[tuple[int, ...], list[float]] = {}
        for count, part in zip(times, intervals, strict=True):
            for name in (
                "arrivals",
                "batchable",
                "arrivals_squared",
                "windows",
                "rows",
                "dispatched",
                "served",
                "hits",
            ):
                setattr(total, name, getattr(total, name) + count * getattr(part, name))
            total.durations = [a + count * b for a, b in zip(total.durations, part.durations, strict=True)]
            for *key, batches, busy, squared in part.cells:
                cell = cells.setdefault(tuple(key), [0, 0.0, 0.0])
                for index, value in enumerate((batches, busy, squared)):
                    cell[index] += count * value
        total.cells = [(*key, int(n), busy, squared) for key, (n, busy, squared) in cells.items()]  # type: ignore[misc] # a key is four
        return total


def _policy(number: int) -> Policy:
    name = f"model-{number:04}"
    return Policy(
        namespace="serving",
        name=name,
        uid=f"policy-{number}",
        generation=1,
        created=EPOCH,
        spec=PolicySpec(
            slo=SLO(latency=Latency(p99=Duration(0.05 + number % 7 / 100))), target_refs=(TargetRef(name=name),)
        ).validate(),
        error="",
        annotated=True,
        status={},
    )


def _workload(target: Target) -> Workload:
    return Workload(
        target=target,
        uid=target.name,
        generation=1,
        annotations={},
        template_annotations={INJECT: "true"},
        selector=f"app={target.name}",
        replicas=PODS,
        created=EPOCH,
        rolling=False,
    )


def _pod(target: Target, index: int) -> Pod:
    return Pod(
        namespace=target.namespace,
        name=f"{target.name}-{index}",
        uid=f"{target.name}-{index}",
        target=target,
        ip="10.244.0.9",
        admin_port=14090,
        ready=True,
        deleting=False,
        template_hash="one",
    )


if __name__ == "__main__":
    sys.exit(main())
