"""The measurements in each scenario: the gate, other rules, and the best fixed cap."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import click
from msgspec import Struct
from msgspec.structs import replace

from carpool.generation.gate import Gate, Limits
from carpool.generation.queues import OUTPUT_COST, PROMPT_COST
from carpool.generation.simulation import Admission, Outcome, Served, Simulation
from carpool_cli.streams.loads import guess, quantile
from carpool_cli.streams.rules import Cap, Nothing, QueuedTokens
from generation.bound import most
from generation.rivals import Aimd
from generation.world import OWN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from carpool.generation.requests import Action, Request
    from generation.world import World

COARSE = (8, 16, 32, 64, 128, 256, 512)
FINE = (0.71, 0.84, 1.19, 1.41)
"""Caps around the best coarse one, as factors."""

MARGINS = (1.0, 0.85)
"""Shares of TTFT that a fixed cap may plan to use up."""

SETTLE = 30.0
"""Seconds after a change in which the gate may learn."""

DRAIN = 120.0
"""Seconds after the last arrival, in which answers may end."""


class Played(Struct, frozen=True):
    """What one rule did: requests per second that met both targets, and what the others saw."""

    goodput: float
    answered: float
    refused: float
    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    tpot_p99: float | None
    preemptions: int
    after_change: float | None = None
    """Goodput from 30 s after the change on."""


class Row(Struct, frozen=True):
    """One scenario with one seed."""

    scenario: str
    seed: int
    capacity: float
    offered: float
    rules: dict[str, Played]
    cap: int
    margin: float
    service_gap: float | None = None
    """Largest difference of service between two tenants that both waited, over its bound."""
    flood_cost: float | None = None
    """Share of its goodput that the scenario's own tenant loses by the other."""
    long_prompts: float | None = None
    """Share of the interactive long prompts beside others that met both targets."""
    bound: float | None = None
    """Goodput that no rule exceeds, whatever it knows; None where it can't be computed."""

    @property
    def share(self) -> float:
        """Goodput of the gate over that of the best fixed cap."""
        return self.rules["carpool"].goodput / self.rules["best cap"].goodput


def row(world: World) -> Row:
    """Play a scenario by every rule."""
    slo, profile = world.scenario.slo, world.profile
    ours, *more = of_gate(world)
    rules = {"carpool": ours}
    best, cap, margin = best_cap(world)
    rules["best cap"] = best
    rules["no gate"] = played(world, simulate(world, Nothing(slo, profile)))
    rules["cap 100"] = played(world, simulate(world, Cap(100, slo, profile)))
    rules["AIMD on TPOT"] = played(world, simulate(world, Aimd(slo, profile)))
    rules["queued tokens"] = played(world, simulate(world, QueuedTokens(slo, profile)))
    capacity, ceiling = world.capacity.rate, most(world)
    return Row(world.scenario.name, world.seed, capacity, offered(world), rules, cap, margin, *more, bound=ceiling)


def again(world: World, before: Row) -> Row:
    """Play the gate again, and keep what other rules did before.

    Raises ``click.ClickException`` where that is out of date: the engine, the load or the best cap is not as it was.
    """
    cap = Cap(before.cap, world.scenario.slo, world.profile, margin=before.margin)
    was = (before.offered, before.capacity, before.rules["best cap"])
    if was != (offered(world), world.capacity.rate, played(world, simulate(world, cap))):
        raise click.ClickException(
            f"{before.scenario}, seed {before.seed}: the load or the best cap isn't what it was, so the other rules "
            "have to be played too: make generation"
        )
    ours, gap, cost, answered = of_gate(world)
    rules = before.rules | {"carpool": ours}
    parts = {"service_gap": gap, "flood_cost": cost, "long_prompts": answered, "bound": most(world)}
    return replace(before, rules=rules, **parts)


def of_gate(world: World) -> tuple[Played, float | None, float | None, float | None]:
    """Play the gate; return what it did, and `service_gap`, `flood_cost` and `long_prompts` of a row."""
    watch = Watch(gate(world))
    outcome = simulate(world, watch)
    cost = None
    if world.scenario.flood is not None:
        alone = own_goodput(world, simulate(world, gate(world), flood=False))
        cost = 1 - own_goodput(world, outcome) / alone
    gap = watch.gap / watch.bound if watch.bound else None
    return played(world, outcome), gap, cost, long_prompts(world, outcome)


def long_prompts(world: World, outcome: Outcome) -> float | None:
    """Return the share of the interactive long prompts beside others that met both targets."""
    other = world.scenario.flood
    if other is None or other.batch or other.prompt_tokens is None:
        return None
    found = [each.good(world.scenario.slo) for each in outcome.served if each.prompt_tokens == other.prompt_tokens]
    return sum(found) / len(found)


def offered(world: World) -> float:
    """Return requests per second of all tenants."""
    return len(world.arrivals()) / world.scenario.seconds


def gate(world: World) -> Gate:
    """Return a gate that knows the targets, and whose first guess of a step is wrong."""
    limits = Limits(max_queued_tokens=world.scenario.max_queued_tokens)
    return Gate(world.scenario.slo, guess(world.profile, world.scenario.start), limits)


def simulate(world: World, rule: Admission, *, flood: bool = True) -> Outcome:
    """Play a scenario."""
    until = world.scenario.seconds + DRAIN
    return Simulation(world.arrivals(flood=flood), world.engine(), rule, until=until, events=world.events()).run()


def best_cap(world: World) -> tuple[Played, int, float]:
    """Return the most goodput of any fixed cap, the cap and its margin."""
    slo, profile = world.scenario.slo, world.profile
    found: dict[tuple[int, float], Played] = {}

    def tried(cap: int, margin: float) -> None:
        if (cap, margin) not in found and 1 <= cap <= profile.max_running:
            found[cap, margin] = played(world, simulate(world, Cap(cap, slo, profile, margin=margin)))

    for cap in COARSE:
        tried(cap, MARGINS[0])
    best = max(found, key=lambda key: found[key].goodput)
    for cap in (best[0], *(round(best[0] * factor) for factor in FINE)):
        for margin in MARGINS:
            tried(cap, margin)
    best = max(found, key=lambda key: found[key].goodput)
    return found[best], *best


def played(world: World, outcome: Outcome) -> Played:
    """Sum up what became of the scenario's own tenant; cancelled requests count for nobody."""
    slo, seconds = world.scenario.slo, world.scenario.seconds
    served = [each for each in outcome.served if each.tenant == OWN]
    good = [each for each in served if each.good(slo)]
    changed = world.scenario.changes_at
    after = None
    if changed is not None:
        since = changed + SETTLE
        after = sum(each.arrival >= since for each in good) / (seconds - since)
    return Played(
        goodput=len(good) / seconds,
        answered=sum(each.end < inf for each in outcome.served) / seconds,
        refused=sum(each.refused for each in served) / seconds,
        ttft_p50=_finite(served, "ttft", 0.5),
        ttft_p99=_finite(served, "ttft", 0.99),
        tpot_p50=_finite(served, "tpot", 0.5),
        tpot_p99=_finite(served, "tpot", 0.99),
        preemptions=outcome.preemptions,
        after_change=after,
    )


def own_goodput(world: World, outcome: Outcome) -> float:
    """Return the goodput of the scenario's own tenant."""
    slo = world.scenario.slo
    return sum(each.good(slo) for each in outcome.served if each.tenant == OWN) / world.scenario.seconds


def _finite(served: Sequence[Served], what: str, share: float) -> float | None:
    values = [getattr(each, what) for each in served if each.end < inf]
    return quantile(values, share) if values else None


class Watch:
    """A gate, and how far the service of two tenants that both wait drifts apart (Sheng et al. 2024, theorem 4.4)."""

    def __init__(self, inside: Gate) -> None:
        self.gap = 0.0
        self.bound = 0.0
        self._gate = inside
        self._since: dict[tuple[str, str], tuple[float, float]] = {}
        self._longest = 0
        self._most_held = 0.0

    def arrive(self, request: Request, now: float) -> list[Action]:
        """Pass it on."""
        self._longest = max(self._longest, request.prompt_tokens)
        actions = self._gate.arrive(request, now)
        self._look()
        return actions

    def poll(self, now: float) -> list[Action]:
        """Pass it on."""
        return self._gate.poll(now)

    def progress(self, now: float, tokens: float) -> list[Action]:
        """Pass it on."""
        actions = self._gate.progress(now, tokens)
        self._look()
        return actions

    def first_token(self, request: Request, now: float) -> list[Action]:
        """Pass it on."""
        return self._gate.first_token(request, now)

    def ended(self, request: Request, now: float, output_tokens: int, *, complete: bool = True) -> list[Action]:
        """Pass it on."""
        return self._gate.ended(request, now, output_tokens, complete=complete)

    def report(self, kv_share: float) -> None:
        """Pass it on."""
        self._gate.report(kv_share)

    def wake_at(self, now: float) -> float:
        """Pass it on."""
        return self._gate.wake_at(now)

    def _look(self) -> None:
        """Compare what tenants were served while both have requests waiting."""
        meter = self._gate.meter
        self._most_held = max(self._most_held, meter.kv)
        waiting = self._gate.waiting()
        if len(waiting) < 2:
            self._since.clear()
            return
        names = sorted(waiting)
        for i, first in enumerate(names):
            for second in names[i + 1 :]:
                now = (waiting[first], waiting[second])
                before = self._since.setdefault((first, second), now)
                self.gap = max(self.gap, abs((now[0] - before[0]) - (now[1] - before[1])))
        for pair in [pair for pair in self._since if not set(pair) <= set(names)]:
            del self._since[pair]
        self.bound = 2 * max(PROMPT_COST * self._longest, OUTPUT_COST * self._most_held)
