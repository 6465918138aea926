"""What tests of verification on real sockets share: policies, models, callers, and what is known of a model."""

from __future__ import annotations

import json

import model_functions
import numpy as np

from carpool_sidecar.axis_verification.check import LONE

FIRST = [{"name": "m", "axis": "First"}]
FIXED = {"*": {"maxBatch": 8, "maxInFlight": 1}}
LARGE = {"*": {"maxBatch": 32, "maxInFlight": 1}}
LINEAR = model_functions.GOOD["linear"]


def state(sidecar):
    (entry,) = sidecar.models
    return sidecar.driver.verifier.state(entry)


def check_of(sidecar):
    (entry,) = sidecar.models
    (check,) = entry.record.checks.values()
    return check


def ones(rng, rows):
    return np.ones((rows, 4), np.float32)


def singles(rng, rows):
    return rng.normal(0, 2, (1, 4)).astype(np.float32)


def rows_of(received):
    return len(json.loads(received.body)["instances"])


async def asked(sidecar, client, load, **fields):
    """One caller's requests, one after the other: by default as many as it takes to begin a trial."""
    told = await load(client, "v1", callers=1, **{"requests": LONE, "draw": singles, **fields})
    assert {one.answer.status for one in told} == {200}
    return told


async def idle(world, sidecar):
    await world.until(lambda: sidecar.batcher.idle)


async def verified(world, sidecar, client, load):
    await asked(sidecar, client, load)
    await world.until(lambda: state(sidecar)[0] == "verified")
    await idle(world, sidecar)
