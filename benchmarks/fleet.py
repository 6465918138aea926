"""`python benchmarks/fleet.py`: what deciding for a large cluster costs, in CPU of one core and in memory.

1,000 policies over 5,000 pods. Reports are made up at the network's edge, by virtual pods, and read as they come over
it: as JSON. A pass reads every pod and steps every controller; what it decides is delivered at once. The first
passes are the dearest: every model is seen for the first time, and searched for. Exit code 1: beyond a limit.
"""

from __future__ import annotations

import argparse
import resource
import sys
from pathlib import Path
from time import process_time
from typing import Generic, TypeVar

from evidence import Figure, conclude
from msgspec.structs import replace
from virtual_pods import INTERVAL, VirtualPod

from carpool.exchange import report as reports
from carpool.policy.durations import Duration
from carpool.policy.spec import SLO, Latency
from carpool_operator.api.annotations import INJECT
from carpool_operator.api.model import Pod, Policy, Reading, Target, View, Workload
from carpool_operator.api.spec import PolicySpec, TargetRef
from carpool_operator.controller import Controller
from carpool_operator.tuning.assignment import assign

HERE = Path(__file__).parent
LIMITS = HERE / "limits.json"
RESULTS = HERE / "results" / "fleet.json"

PODS = 5
"""Of each policy."""

C = TypeVar("C", bound=Controller)

EPOCH = 1_790_000_000.0

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


class Fleets(Generic[C]):
    """All policies, their pods, and who decides for them."""

    def __init__(self, policies: int, controller: type[C] = Controller) -> None:  # type: ignore[assignment] # the default
        self.documents = 0
        """Published after all had settled."""
        self.writes = 0.0
        """Statuses written then."""
        self._policies = [_policy(number) for number in range(policies)]
        self.controllers = [controller() for _ in range(policies)]
        self._pods = [[VirtualPod(number * PODS + index) for index in range(PODS)] for number in range(policies)]
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
        for number, controller in enumerate(self.controllers):
            policy, virtual = self._policies[number], self._pods[number]
            target = Target(policy.namespace, "Deployment", policy.name)
            pods = [_pod(target, index) for index in range(PODS)]
            bodies = {
                pod.uid: reports.encode(one.report(self._passes, str(target)))
                for pod, one in zip(pods, virtual, strict=True)
            }
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
                workload_events={},
            )
            outcome = controller.step(view)
            took += process_time() - begun
            for document in outcome.documents:
                for pod, one in zip(pods, virtual, strict=True):
                    if document.pods is None or pod.uid in document.pods:
                        one.receive(document.change, self._passes)
            if self._passes > SETTLED:
                self.documents += len(outcome.documents)
                self.writes += outcome.status != policy.status
            self._policies[number] = replace(policy, status=outcome.status)
        return took


def _policy(number: int) -> Policy:
    name = f"model-{number:04}"
    return Policy(
        namespace="serving",
        name=name,
        uid=f"policy-{number}",
        generation=1,
        created=EPOCH,
        spec=PolicySpec(slo=SLO(latency=Latency(p99=Duration(0.05))), target_refs=(TargetRef(name=name),)).validate(),
        error="",
        made_for=Target("serving", "Deployment", name),
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
