"""Drive the Batcher with random stimuli for as long as you like: ``python tests/carpool/soak.py --steps 1000000``.

A failure prints the seed of its run; the same seed fails again at the same step.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parent))

from machine import Driver, random_step

RUN = 2000
"""Steps with one Batcher before the next seed's begins: faults of set-up need many beginnings."""


def say(line: str) -> None:
    """Print at once, also into a file."""
    print(line, flush=True)  # noqa: T201 - a command prints


def soak(seed: int, steps: int) -> Driver:
    """Run one Batcher from its seed, to its end."""
    random = Random(seed)
    driver = Driver(retry_transport=random.random() < 0.5)
    for step in range(steps):
        try:
            random_step(driver, random)
        except BaseException:
            say(f"failed: seed {seed}, step {step} (replay: --seed {seed} --steps {steps})")
            raise
    driver.quiesce()
    driver.check_totals()
    return driver


def main() -> None:
    """Soak."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    say(f"soak: {arguments.steps:,} steps from seed {arguments.seed}")
    requests = 0
    for number, start in enumerate(range(0, arguments.steps, RUN)):
        requests += soak(arguments.seed + number, min(RUN, arguments.steps - start)).arrivals
        done = start + RUN
        if done % 100_000 == 0:
            say(f"{done:,} steps, {requests:,} requests, seed {arguments.seed + number}: all accounted for")
    say("soak: passed")


if __name__ == "__main__":
    main()
