"""What a sidecar says of itself, as this demonstration reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from carpool.batching.counters import Stats
from carpool.policy.parameters import Parameters
from carpool.policy.plain import from_plain

if TYPE_CHECKING:
    from carpool_cli.demo.processes import Client, Running


class Look(NamedTuple):
    """A sidecar at one moment, ``at`` seconds from the start of the load."""

    at: float
    stats: Stats
    parameters: Parameters
    times: list[float] | None
    """Seconds a batch of so many rows takes, as far as it is known."""
    cpu: float
    """Seconds of CPU its process has had."""


class Count(NamedTuple):
    """A device at one moment, ``at`` seconds from the start: what it computed so far."""

    at: float
    rows: int
    batches: int
    seconds: float
    """Sum of t(rows) over its batches, by its profile."""
    busy: float = 0.0
    """As the device counted them itself."""


class Choice(NamedTuple):
    """What a sidecar ran with at one moment."""

    at: float
    parameters: Parameters
    busy: float = 0.0
    """Seconds with a batch in flight that it had counted by then."""


class Span(NamedTuple):
    """Between two looks at a model."""

    requests: int
    device_time: float
    """Seconds with a batch in flight, per request served."""
    cpu: float
    """Seconds of CPU per request served, parsing and all; 0 where the system does not tell."""
    busy: float
    """Share of the time with a batch in flight."""
    mean_batch: float

    @property
    def cost(self) -> float:
        """Seconds per request of what neighbours on a busy machine change least: CPU, where that is known."""
        return self.cpu or self.device_time


async def look(admin: Client, sidecar: Running, model: str, at: float) -> Look | None:
    """Look at a model's sidecar; ``None`` before its first request."""
    document: dict[str, Any] = await admin.get("/v1/stats")
    lane = document["lanes"].get(model)
    if lane is None:
        return None
    parameters = from_plain(lane["parameters"], Parameters, what="parameters")
    if lane["passThrough"] != parameters.pass_through:
        parameters = msgspec.structs.replace(parameters, pass_through=lane["passThrough"])
    return Look(
        at, msgspec.convert(document["stats"], Stats), parameters, lane["serviceSeconds"], sidecar.cpu_seconds()
    )


def between(first: Look, last: Look, model: str) -> Span:
    """Return what was counted between two looks."""
    counted = last.stats.since(first.stats)
    stats = counted.models[model]
    # Cells that suppose a number of executors count the same batches again.
    batches = sum(cell[4] for cell in stats.cells if cell[3] == 0)
    rows = sum(cell[1] * cell[4] for cell in stats.cells if cell[3] == 0)
    served = max(stats.served, 1)
    return Span(
        stats.served,
        counted.device_busy / served,
        (last.cpu - first.cpu) / served,
        counted.device_busy / max(last.at - first.at, 1e-9),
        rows / max(batches, 1),
    )


async def decisions(sidecar: Client) -> list[tuple[float, str, str, bool]]:
    """Return what was decided: (seconds since the epoch, reason, message, whether anything changed)."""
    document = await sidecar.get("/v1/explain")
    return [
        (one["at"], one["decision"]["reason"], one["decision"]["message"], one["decision"]["change"])
        for one in document["decisions"]
    ]
