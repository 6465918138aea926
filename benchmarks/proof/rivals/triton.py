"""Triton's dynamic batcher: preferred sizes leave at once, anything else waits for the queue delay."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from proof.rivals.fifo import Fifo, Verdict
from proof.rivals.settings import Still, half_slo_batch, latencies, setting

if TYPE_CHECKING:
    from collections.abc import Iterable
    from random import Random

    from proof.rivals.fifo import Line
    from proof.world import Knowledge

DELAY = 0.4
"""Share of the SLO. With half of it, who waited for the delay and then for an instance would be timed out."""

SMALLEST = 4
"""Preferred sizes are the powers of two from here on, as in the documentation's example of 4 and 8, and the largest."""


def preferred_sizes(largest: int) -> tuple[int, ...]:
    """Return the sizes that are preferred up to ``largest`` rows, ascending."""
    powers = [SMALLEST << step for step in range(largest.bit_length()) if SMALLEST << step < largest]
    return (*powers, largest)


class Triton(Fifo):
    """triton-inference-server/core at 73aad7c, src/dynamic_batch_scheduler.cc, ``GetDynamicBatch``.

    With an instance free, it sends the largest preferred size that the queue can fill. If the queue fills no preferred
    size, it waits for the delay. Once its head has waited for the delay, all requests that fit are sent. Requests that
    have queued for longer than the timeout are rejected (``ApplyPolicyAtCursor``).

    The delay and the largest batch follow the documentation's "Recommended Configuration Process" (server,
    docs/user_guide/batcher.md): as large as the latency budget allows. In its favour, they are right without trials:
    the largest batch takes half the SLO, like Nexus's. The timeout, which is off by default, is the SLO minus the
    latency of this batch. The delay ends a tenth of the SLO before the timeout. There is an instance for each batch
    that the device computes at once.
    """

    def __init__(self, *, slots: int, preferred: Iterable[int], delay: float, timeout: float = inf) -> None:
        """Start empty. ``delay`` and ``timeout`` in seconds of waiting."""
        self._preferred = sorted(preferred)
        self._delay = delay
        self._timeout = timeout
        super().__init__(slots=slots, max_batch=self._preferred[-1])

    def decide(self, line: Line, now: float) -> Verdict:
        """Send a preferred size at once, anything else when the delay is over."""
        late = line.late(now - self._timeout)
        if late.rows == line.rows:
            return Verdict(late=late.requests)
        rows = min(line.rows - late.rows, self.cap)
        due = line.requests[late.requests].arrived + self._delay
        if now >= due or rows == self.cap:
            return Verdict(rows, late=late.requests)
        fits = [size for size in self._preferred if size <= rows]
        return Verdict(fits[-1] if fits else 0, again=due, late=late.requests)


def contender(knowledge: Knowledge, _rng: Random) -> Still:
    """Preferred sizes up to Nexus's batch, and a delay of almost half the SLO."""
    batch = half_slo_batch(knowledge)
    chosen = setting(knowledge, batch, DELAY * knowledge.slo)
    return Still(
        chosen,
        lambda: Triton(
            slots=chosen.parameters.max_in_flight,
            preferred=preferred_sizes(batch),
            delay=float(chosen.parameters.max_wait),
            timeout=knowledge.slo - latencies(knowledge)[batch],
        ),
    )
