"""A sidecar's reports, as this demonstration reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from carpool.batching.counters import Stats
from carpool.policy.parameters import Parameters
from carpool.policy.plain import from_plain

if TYPE_CHECKING:
    from carpool_cli.demo.processes import Client, Running


class Look(NamedTuple):
    """A sidecar's state at one moment, ``at`` seconds from the start of the load."""

    at: float
    stats: Stats
    parameters: Parameters
    times: list[float] | None
    """Batch latency in seconds by rows, as far as known."""
    cpu: float
    """CPU seconds of its process."""
    tuner: float
    """CPU seconds of its tuner's process."""


class Count(NamedTuple):
    """A device's counts at one moment, ``at`` seconds from the start."""

    at: float
    rows: int
    batches: int
    seconds: float
    """Sum of the profile's latency over its batches."""
    busy: float = 0.0
    """As counted by the device."""


class Choice(NamedTuple):
    """A sidecar's parameters at one moment."""

    at: float
    parameters: Parameters
    busy: float = 0.0
    """Seconds with a batch in flight, counted until then."""


class Span(NamedTuple):
    """The counts of a model between two polls."""

    requests: int
    device_time: float
    """Seconds with a batch in flight, per request served."""
    cpu: float
    """CPU seconds per served request, including parsing; 0 if the system does not report them."""
    busy: float
    """Share of the time with a batch in flight."""
    mean_batch: float

    @property
    def cost(self) -> float:
        """Seconds per request by the measure that other programs on a busy machine affect least: CPU, where known."""
        return self.cpu or self.device_time


async def look(admin: Client, sidecar: Running, model: str, at: float) -> Look | None:
    """Read a model's sidecar; ``None`` before its first request."""
    document: dict[str, Any] = await admin.get("/v1/stats")
    lane = document["lanes"].get(model)
    if lane is None:
        return None
    parameters = from_plain(lane["parameters"], Parameters, what="parameters")
    if lane["passThrough"] != parameters.pass_through:
        parameters = msgspec.structs.replace(parameters, pass_through=lane["passThrough"])
    return Look(
        at, msgspec.convert(document["stats"], Stats), parameters, lane["serviceSeconds"], *sidecar.cpu_seconds()
    )


def between(first: Look, last: Look, model: str, *, tuned: bool = True) -> Span:
    """Return the counts between two polls; ``tuned``: the tuner's CPU time is a cost, too."""
    counted = last.stats.since(first.stats)
    stats = counted.models[model]
    # Cells for a server concurrency above 1 count the same batches again.
    batches = sum(cell[4] for cell in stats.cells if cell[3] == 0)
    rows = sum(cell[1] * cell[4] for cell in stats.cells if cell[3] == 0)
    served = max(stats.served, 1)
    return Span(
        stats.served,
        counted.device_busy / served,
        (last.cpu - first.cpu + (last.tuner - first.tuner if tuned else 0.0)) / served,
        counted.device_busy / max(last.at - first.at, 1e-9),
        rows / max(batches, 1),
    )


async def decisions(sidecar: Client) -> list[tuple[float, str, str, bool]]:
    """Return the decisions: (seconds since the epoch, reason, message, whether anything changed)."""
    document = await sidecar.get("/v1/explain")
    return [
        (one["at"], one["decision"]["reason"], one["decision"]["message"], one["decision"]["change"])
        for one in document["decisions"]
    ]
