from __future__ import annotations

from machine import estimate

from carpool.batching.model_state import ModelState
from carpool.policy.parameters import Parameters


def test_a_replaced_server_is_unknown() -> None:
    of = ModelState("m", Parameters(max_batch=64))
    of.belief.estimate = estimate()
    of.first_batches.seen.add((0, 1))
    of.isolation.quarantined = True
    of.limits.too_large(64, works=32)
    of.forget()
    assert (of.belief.estimate, of.first_batches.seen, of.isolation.quarantined, of.cap) == (None, set(), False, 64)
