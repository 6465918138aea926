"""Whether a sidecar reports its capacity a minute after its start: ``python benchmarks/live_capacity.py``.

Scenarios of the proof whose load stays as it is, at 30, 50 and 80 % of what a replica can serve, with the tuner in the
loop, which knows nothing at first and begins with first calls, as in a sidecar. The figure that `/capacity` has after a
minute is compared with the capacity by the true batch latency. Searches are as rare as in a sidecar where each takes
0.5 s of CPU, or 1.7 s with bursts. As in the sidecar, batches made of copies measure sizes that the load does not fill,
within the rows that the sidecar allows itself for them. Servers that compute several batches at once are
played without first calls, too: a sidecar makes none where a `baseline` is written, or with `passThrough.mode: Never`.
Virtual time, seeded. Exit code 1: beyond the limit, with first calls.
"""

from __future__ import annotations

import argparse
import sys
from itertools import count, product
from random import Random
from typing import TYPE_CHECKING, Any

import compiled
import msgspec
from autoscaling import HERE, searched, situation_of
from evidence import commit, today
from msgspec.structs import replace

from carpool.batching.counters import Stats
from carpool.exchange.decision import Observation
from carpool.learning.arrivals import first
from carpool.policy.durations import Duration
from carpool.policy.spec import Objective
from carpool.simulation.outcome import Setting
from carpool.simulation.simulator import Simulation
from carpool.tuning.tuner import INTERVAL, Tuner
from carpool_cli.planning import assumptions
from carpool_cli.planning.sidecar_batcher import SidecarBatcher
from carpool_sidecar.tuning.messages import Decided, Measured, Observations, Observed
from carpool_sidecar.tuning.tuner_process import Tuners

if TYPE_CHECKING:
    from carpool.forecasting.capacity import Capacity
    from carpool.forecasting.forecaster import Situation
    from carpool.policy.spec import BatchingPolicy

SCENARIOS = (
    "bert-base-t4", "bert-large-a100-loose", "resnet50-v100-waves", "ranking-1-core-bursty", "ocr-1-core-bursty",
    "tiles-32", "magika-8-cores", "synthetic-4-executors", "resnet50-v100-flat",
)  # fmt: skip
SEVERAL = ("magika-8-cores", "synthetic-4-executors")
"""Those whose server computes several batches at once."""
RESULTS = HERE / "results" / "live-capacity.json"
WITHIN = 0.10
LOADS, SEEDS = (0.3, 0.5, 0.8), (1, 2)
SECONDS = 60.0
SECONDS_POISSON, SECONDS_BURSTY = 0.5, 1.7
"""CPU time assumed for a search: the next one waits for a hundred times as long."""


def live(
    situation: Situation,
    device: Any,  # noqa: ANN401 - a Device
    policy: BatchingPolicy,
    rate: float,
    seed: int,
    *,
    first_calls: bool = True,
) -> tuple[Capacity, float]:
    """Return what the tuner says after a minute, and the share of requests that missed the SLO meanwhile."""
    undecided = policy.limits().max_in_flight if first_calls else 0
    cost = SECONDS_BURSTY if situation.process.dispersion > 1 else SECONDS_POISSON
    spent = count(0.0, cost)
    tuners, batchers, begun = Tuners(policy, cpu=lambda: next(spent)), [], Tuner(policy).parameters
    parameters, decided, before = begun, False, Stats(at=0.0)
    reported: Capacity | None = None

    def batcher() -> SidecarBatcher:
        batchers.append(SidecarBatcher(begun, undecided=undecided))
        return batchers[-1]

    def observe(now: float, stats: list[Stats]) -> list[Setting] | None:
        nonlocal parameters, decided, before, reported
        delta, before = stats[0].since(before), stats[0]
        if "" not in delta.models:
            return None
        observation = Observation(now=now, seconds=INTERVAL, stats=delta.models[""], queued_rows=delta.queued_rows)
        settings = []
        for reply in tuners.step(Observations({"": Observed(observation, parameters, 0)})):
            if isinstance(reply, Decided):
                decision = reply.decision
                parameters, decided = decision.parameters, decided or decision.decided
                settings.append(Setting(parameters, decision.estimate, decision.shed_slo, decided))
                batchers[0].wanted = reply.measure
            elif isinstance(reply, Measured):
                reported = reply.capacity
        return settings

    process = replace(situation.process, rate=rate)
    run = Simulation(
        first(process, int(SECONDS * rate), Random(f"{seed} live")), device, slo=situation.target,
        parameters=begun, dispatcher=batcher, seed=seed,
    )  # fmt: skip
    outcome = run.every(INTERVAL, observe).run()
    if reported is None:
        raise SystemExit("no batch was measured in a minute")
    return reported, outcome.summary().miss_fraction


def play(name: str, *, first_calls: bool = True) -> list[dict[str, Any]]:
    """Play one scenario at each load, by each objective that a policy may have in force."""
    scenario = msgspec.json.decode((HERE / "scenarios" / f"{name}.json").read_bytes())
    slo, cv = float(Duration.parse(scenario["slo"])), scenario["arrivals"].get("cv", 1.0)
    situation, profile = situation_of(scenario["profile"], slo, cv, scenario.get("executors"))
    truth, device = searched(situation).rate, assumptions.device(profile)
    rows = []
    for objective, load, seed in product((Objective.BALANCED, Objective.EFFICIENCY), LOADS, SEEDS):
        policy = assumptions.slo_policy(slo, largest_batch=profile.largest_safe or 64, objective=objective)
        found, missed = live(situation, device, policy, load * truth, seed, first_calls=first_calls)
        row = {
            "scenario": name, "objective": objective.value, "load": load, "seed": seed, "true": truth,
            "live": found.rate, "lower": found.lower, "error": found.rate / truth - 1, "missed": missed,
        }  # fmt: skip
        rows.append(row)
        print(
            f"{name:24} {objective:10} {load:.0%} seed {seed}: {found.rate:8.1f} of {truth:8.1f}  {row['error']:+.1%}"
            f"  (lower {found.lower / truth - 1:+.1%})  {missed:.2%} missed",
            flush=True,
        )
    return rows


def main() -> int:
    """Measure, write, and say what is beyond the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "scenario", nargs="*", choices=[[], *SCENARIOS], metavar="SCENARIO",
        help=f"only these, without keeping the results; of {', '.join(SCENARIOS)}",
    )  # fmt: skip
    wanted = parser.parse_args().scenario
    compiled.start_again()
    names = wanted or list(SCENARIOS)
    rows = [row for name in names for row in play(name)]
    print("without first calls")
    without = [row for name in names if name in SEVERAL for row in play(name, first_calls=False)]
    if not wanted:
        document = {
            "date": today(), "commit": commit(), "seconds": SECONDS, "figures": rows, "withoutFirstCalls": without,
        }  # fmt: skip
        RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    wrong = [row for row in rows if abs(row["error"]) > WITHIN]
    print(f"{len(rows) - len(wrong)} of {len(rows)} within {WITHIN:.0%}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
