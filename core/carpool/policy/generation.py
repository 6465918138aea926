"""Token streams in a policy: the targets of a language model's answers, and bounds of the gate that meets them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, field

from carpool.policy.durations import Duration
from carpool.policy.plain import Camel, PolicyError


class TokenTarget(Camel, frozen=True):
    """A target of token streams."""

    p99: Duration
    """99 % within this."""


class ClassTarget(Camel, frozen=True):
    """Targets of the token streams that ask for a class, with the request header `x-carpool-priority`."""

    priority: Annotated[str, Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", max_length=63)]
    """The header's value, e.g. `gold`. `batch` is taken: such requests have no targets."""
    ttft: TokenTarget | None = None
    """Time to the first token; unset: the policy's."""
    tpot: TokenTarget | None = None
    """Mean time per output token after the first; unset: the policy's. While such a request is with the engine, no
    other is admitted that would slow it beyond this."""


def validate_targets(
    ttft: TokenTarget | None, tpot: TokenTarget | None, classes: tuple[ClassTarget, ...], bounds: Generation
) -> None:
    """Check that targets can be met, and that bounds have one; raises ``PolicyError``."""
    if tpot is not None and ttft is None:
        raise PolicyError("slo.ttft", "slo.tpot needs it: without it requests wait without bound, e.g. p99: 2s")
    if classes and ttft is None:
        raise PolicyError("slo.ttft", "slo.classes need it: requests without a class have to have targets, too")
    if bounds != Generation() and ttft is None:
        raise PolicyError("slo.ttft", "generation needs it: without it there is no gate to bound, e.g. p99: 2s")
    targets, seen = {"slo.ttft": ttft, "slo.tpot": tpot}, {"batch"}
    for index, each in enumerate(classes):
        path = f"slo.classes[{index}]"
        if each.priority in seen:
            why = "has no targets" if each.priority == "batch" else "is named twice"
            raise PolicyError(f"{path}.priority", f"{each.priority!r} {why}")
        seen.add(each.priority)
        if each.ttft is None and each.tpot is None:
            raise PolicyError(path, "name ttft or tpot, e.g. ttft: {p99: 1s}")
        targets |= {f"{path}.ttft": each.ttft, f"{path}.tpot": each.tpot}
    for path, target in targets.items():
        if target is not None and target.p99 <= 0:
            raise PolicyError(f"{path}.p99", "must be longer than 0s")


class Order(StrEnum):
    """In which order the requests of one tenant are admitted.

    FCFS: first come, first served. ShortestPromptFirst: a prompt of 1,000 tokens is overtaken by shorter ones that come
    up to 2 s later.
    """

    FCFS = "FCFS"
    SHORTEST_PROMPT_FIRST = "ShortestPromptFirst"


class Tenants(Camel, frozen=True):
    """Whose request it is, and what share of the engine's tokens each tenant may have while others wait."""

    header: Annotated[str, Meta(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$", min_length=1, max_length=128)]
    """Request header whose value names the tenant, e.g. `x-tenant`. Requests without it are one tenant."""
    weights: Annotated[
        dict[Annotated[str, Meta(max_length=253)], Annotated[float, Meta(gt=0.0, le=1e6)]], Meta(max_length=256)
    ] = field(default_factory=dict)
    """Shares by tenant; 1 for those that are not named."""


class Generation(Camel, frozen=True):
    """Bounds of the gate for token streams. The gate finds the rest; it needs a token SLO to do anything."""

    max_running: Annotated[int, Meta(ge=1)] | None = None
    """Sequences that the engine gets at once, at most (a request with `n` choices is n); unset: as the SLO allows."""
    kv_budget_percent: Annotated[int, Meta(ge=1, le=100)] = 80
    """Share of the engine's KV cache, in percent, that the streams may be forecast to fill."""
    kv_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Tokens that the KV cache holds; unset: learned from what the engine reports, if it does."""
    order: Order = Order.FCFS
    """Which of a tenant's requests is next."""
    tenants: Tenants | None = None
    """Fair shares among tenants; unset: all requests are one tenant's."""
    max_queued_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Prompt tokens that may wait; further requests get 429. Requests of batch priority have as many of their own. Each
    tenant that waits may have its share, by weight, even if others fill the rest, and one request; all of them together
    have twice the limit at most. Unset: bounded by the SLO for TTFT alone."""
