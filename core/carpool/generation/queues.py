"""Which request is next: fair shares by tokens among tenants, an order inside each, and ageing in both.

Fairness is the Virtual Token Counter (Sheng et al. 2024, "Fairness in Serving Large Language Models"): the tenant that
got the fewest tokens, over its weight, is next. A returning tenant starts at the counter of the least served one,
less a credit. While two tenants both have waiting requests, their service differs by at most 2 max(prompt cost of
the longest request, output cost of all requests in the engine), whatever others send.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import inf
from typing import TYPE_CHECKING

from carpool.generation.requests import State
from carpool.policy.generation import Order

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from carpool.generation.requests import Request

PROMPT_COST, OUTPUT_COST = 1.0, 2.0
"""Costs of a token, as in the paper: an output token occupies the engine for a step."""

OVERTAKING = 0.002
"""Seconds per prompt token: a prompt of 1,000 tokens is overtaken by shorter ones that come up to 2 s later, and no
more."""


CREDIT = 32_000.0
"""Credit, in cost, of a returning tenant: some twenty conversations. Without it, a tenant that sends two thirds of its
share waits as long as at full load when a few of its requests come together."""

MOST_SHARES = 2.0
"""Bound on all waiting requests, as a multiple of the limit. Callers name tenants: each of 2,000 has a share."""

MOST_TENANTS = 1024
"""Tenants that are remembered, unless more have requests here."""


class Tenant:
    """One tenant's requests and its service."""

    __slots__ = ("_since", "decoding", "name", "prompt_tokens", "queue", "queued_cost", "total", "weight")

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight
        self.queue: list[tuple[float, int, Request]] = []
        self.queued_cost = 0.0
        self.prompt_tokens = 0
        """Prompt tokens of its requests in the queue."""
        self.decoding = 0
        self.total = 0.0
        """Cost of the tokens it was served over its weight, at the last update."""
        self._since = 0.0

    def counter(self, steps: float) -> float:
        """Return the cost of its service over its weight; ``steps`` are the engine's so far.

        Each step served a token to each of its streams.
        """
        self.total += OUTPUT_COST * (steps - self._since) * self.decoding / self.weight
        self._since = steps
        return self.total

    def decodes(self, more: int, steps: float) -> None:
        """Count sequences that begin to decode, or fewer that do."""
        self.counter(steps)
        self.decoding += more

    def charge(self, cost: float, steps: float) -> None:
        """Count ``cost`` tokens as served."""
        self.total = self.counter(steps) + cost / self.weight

    def lift(self, counter: float, steps: float) -> None:
        """Raise the counter: a tenant does not save up service that it did not use."""
        self.total = max(self.counter(steps), counter)


class FairQueue:
    """Requests that wait, by tenant."""

    def __init__(self, order: Order = Order.FCFS, weights: Mapping[str, float] | None = None) -> None:
        self._order = order
        self._weights = dict(weights or {})
        self._tenants: dict[str, Tenant] = {}
        self._classes = False
        """Whether requests with their own targets have come: then the order is not that of arrival."""
        self._last = 0.0
        """Counter of the tenant of the last request taken."""
        self.requests = 0
        self.prompt_tokens = 0

    def configure(self, order: Order, weights: Mapping[str, float] | None) -> None:
        """Set another order and other weights; waiting requests are put in the new order."""
        self._order = order
        self._weights = dict(weights or {})
        for tenant in self._tenants.values():
            tenant.weight = self._weights.get(tenant.name, 1.0)
            tenant.queue = [(self._rank(request), key, request) for _, key, request in tenant.queue]
            heapify(tenant.queue)

    def __iter__(self) -> Iterator[Request]:
        """Yield every waiting request, in no order."""
        return (request for tenant in self._tenants.values() for _, _, request in tenant.queue)

    def tenant(self, name: str) -> Tenant:
        """Return a tenant, known or new."""
        if name not in self._tenants:
            if len(self._tenants) >= MOST_TENANTS:
                self._forget()
            self._tenants[name] = Tenant(name, self._weights.get(name, 1.0))
        return self._tenants[name]

    def waiting(self, steps: float) -> dict[str, float]:
        """Return the counters of the tenants that have requests here."""
        return {tenant.name: tenant.counter(steps) for tenant in self._tenants.values() if tenant.queue}

    def put(self, request: Request, steps: float) -> None:
        """Add a request."""
        tenant = self.tenant(request.tenant)
        if not tenant.queue:
            others = [other.counter(steps) for other in self._tenants.values() if other.queue]
            tenant.lift((min(others) if others else self._last) - CREDIT / tenant.weight, steps)
        heappush(tenant.queue, (self._rank(request), request.key, request))
        self._classes = self._classes or request.targets is not None
        tenant.queued_cost += request.cost
        tenant.prompt_tokens += request.prompt_tokens
        self.requests += 1
        self.prompt_tokens += request.prompt_tokens

    def full(self, request: Request, limit: float) -> bool:
        """Whether a request is too much for a queue of ``limit`` prompt tokens.

        A tenant that fills the queue keeps no other out: each waiting tenant may have its share of the limit, by
        weight, and one request, up to ``MOST_SHARES`` of the limit in all. Unused shares are available to all.
        """
        tokens = self.prompt_tokens + request.prompt_tokens
        if not self.requests or tokens <= limit:
            return False
        if tokens > MOST_SHARES * limit:
            return True
        own = self.tenant(request.tenant)
        if not own.queue:
            return False
        weights = sum(tenant.weight for tenant in self._tenants.values() if tenant.queue)
        return own.prompt_tokens + request.prompt_tokens > limit * own.weight / weights

    def head(self, steps: float) -> Request | None:
        """Return the request that is next."""
        waiting = [tenant for tenant in self._tenants.values() if tenant.queue]
        if not waiting:
            return None
        return min(waiting, key=lambda tenant: tenant.counter(steps)).queue[0][2]

    @property
    def cost(self) -> float:
        """Cost of all waiting requests."""
        return sum(tenant.queued_cost for tenant in self._tenants.values())

    def take(self, request: Request, steps: float) -> None:
        """Remove the head of its tenant, which goes to the engine."""
        tenant = self._tenants[request.tenant]
        heappop(tenant.queue)
        self._last = tenant.counter(steps)
        tenant.charge(PROMPT_COST * request.prompt_tokens, steps)
        self._left(tenant, request)

    def remove(self, request: Request) -> None:
        """Remove a request from anywhere."""
        tenant = self._tenants[request.tenant]
        tenant.queue = [entry for entry in tenant.queue if entry[2] is not request]
        heapify(tenant.queue)
        self._left(tenant, request)

    def ahead(self, request: Request, steps: float) -> float:
        """Return the cost of the requests that would be taken before one that is not in the queue yet.

        Its own tenant's requests of a lower rank come first, and of each other tenant those that its counter allows
        while this tenant's counter grows by its own.
        """
        own = self.tenant(request.tenant)
        rank = self._rank(request)
        if self._order is Order.FCFS and not self._classes and request.targets is None:
            before = own.queued_cost
        else:
            before = sum(other.cost for value, _, other in own.queue if value <= rank)
        waiting = [tenant for tenant in self._tenants.values() if tenant.queue and tenant is not own]
        if not waiting:
            return before
        reached = own.counter(steps) + before / own.weight
        others = (max(0.0, (reached - t.counter(steps)) * t.weight) for t in waiting)
        return before + sum(min(t.queued_cost, gained) for t, gained in zip(waiting, others, strict=True))

    def _forget(self) -> None:
        """Drop the less served half of the tenants without requests: they would start with no lower counter."""
        idle = [tenant for tenant in self._tenants.values() if not tenant.queue and not tenant.decoding]
        for tenant in sorted(idle, key=lambda tenant: tenant.total)[: (len(idle) + 1) // 2]:
            del self._tenants[tenant.name]

    def _left(self, tenant: Tenant, request: Request) -> None:
        tenant.queued_cost = tenant.queued_cost - request.cost if tenant.queue else 0.0
        tenant.prompt_tokens -= request.prompt_tokens
        self.requests -= 1
        self.prompt_tokens -= request.prompt_tokens

    def _rank(self, request: Request) -> float:
        """Return a request's rank: by when its first token is due, so that no class starves."""
        turn = request.arrival if request.targets is None else request.arrival + request.targets.later
        return turn if self._order is Order.FCFS else turn + OVERTAKING * request.prompt_tokens


class Expiry:
    """When waiting requests become too late, in any place of the queue."""

    def __init__(self) -> None:
        self._times: list[tuple[float, int, Request]] = []

    def put(self, at: float, request: Request) -> None:
        """Note a time, if there is one."""
        if at < inf:
            heappush(self._times, (at, request.key, request))

    def due(self, now: float) -> Iterator[Request]:
        """Yield the requests that are now too late and still wait."""
        while self.next_at() < now:
            yield heappop(self._times)[2]

    def next_at(self) -> float:
        """Return the first time at which a waiting request is too late."""
        while self._times and self._times[0][2].state is not State.QUEUED:
            heappop(self._times)
        return self._times[0][0] if self._times else inf
