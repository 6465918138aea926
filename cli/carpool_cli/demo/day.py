"""A day in two minutes: one load, four servers with a stand-in accelerator each, four ways to batch in parallel.

In parallel, so that a pause of this host affects all of them alike.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace
from rich.markup import escape

from carpool.policy.durations import format_seconds
from carpool_cli.demo.load import Aim, Driven, drive, report_on
from carpool_cli.demo.observed import Choice, Count, decisions, look
from carpool_cli.demo.processes import Client, Processes, Running
from carpool_cli.demo.saved import Compared, compare
from carpool_cli.load.loadgen import due_times
from carpool_cli.load.servers import InputSpec, request_of
from carpool_cli.profiling import device_profile
from carpool_cli.profiling.arrays import random_rows, to_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from carpool.learning.latency_model import ServiceTime
    from carpool_cli.demo.screen import Screen
    from carpool_cli.load.report import Report
    from carpool_cli.profiling.device_profile import DeviceProfile

MODEL = "standin"
SLO = 0.25

SLOWER = 10
"""Factor on the profile's times. At its own 2 ms per request this host's pauses, not the batching, would determine the
p99."""

HOURS = (
    ("night", 15.0),
    ("dawn", 35.0),
    ("morning", 110.0),
    ("rush", 290.0),
    ("noon", 160.0),
    ("evening", 30.0),
)
"""Requests per second, each for an equal share of the time. In single requests the device below serves 48/s, in batches
of 8 243/s."""

ZERO_WAIT = {"maxBatch": 64, "maxWait": "0s", "maxInFlight": 1, "passThrough": False}
FIXED = {"maxBatch": 8, "maxWait": "2ms", "maxInFlight": 1, "passThrough": False}

SHAPE = InputSpec("input", "FP32", (16,))
BODIES = 64


class Hour(NamedTuple):
    """One arm's results in a part of the day."""

    name: str
    rate: float
    report: Report
    device_time: float
    """Device seconds per computed row."""
    mean_batch: float
    busy: float
    """Share of the time, 0 to 1, for which the device computed."""


class Arm(NamedTuple):
    """One way to batch, and its results."""

    name: str
    driven: Driven
    counts: Sequence[Count]
    choices: Sequence[Choice]
    hours: Sequence[Hour]
    whole: Hour


class Day(NamedTuple):
    """All of it."""

    device: DeviceProfile
    seconds: float
    hours: Sequence[tuple[str, float]]
    arms: Sequence[Arm]
    decisions: Sequence[tuple[str, str, str]]
    """Changes of parameters: the part of the day, the reason, the change and its message."""
    saved: Compared | None = None
    """The forecast of `carpool savings` for a setting of this day, and the device's own count."""


async def live(
    profile: DeviceProfile, hours: Sequence[tuple[str, float]], seconds: float, processes: Processes, screen: Screen
) -> Day:
    """Play the load that rises and falls over ``seconds``."""
    device = slower(profile)
    screen.title(f"A day in {seconds:.0f} s on a stand-in for an accelerator")
    _introduce(device, screen)
    devices, sidecars = await _servers(device, processes, screen)
    tuned = sidecars[-1]
    # 1. One load for all.
    requests = [request_of("v2-binary", to_tensors(random_rows([SHAPE], 1, seed))) for seed in range(BODIES)]
    rates = [rate for _, rate in hours]
    due = due_times(rates, 1.0, seconds, random.Random(20))  # noqa: S311 - load, no secret
    screen.step(
        f"{len(due)} requests to each, at the same moments: "
        + ", ".join(f"{name} {rate:.0f}/s" for name, rate in hours)
    )
    curve = device.service_time()
    clients = [Client(each.admin) for each in devices]
    admin = Client(tuned.admin)
    counts: list[list[Count]] = [[] for _ in devices]
    choices: list[Choice] = []
    started = time.time()
    with screen.load(seconds) as show_bar:

        async def tick(at: float) -> None:
            processes.check()
            for client, seen in zip(clients, counts, strict=True):
                seen.append(_counted(at, await client.get("/stats"), curve))
            if (now := await look(admin, tuned, MODEL, at)) is not None:
                choices.append(Choice(at, now.parameters, now.stats.device_busy))
                show_bar(at, f"{_hour(at, seconds, hours)}: {now.parameters.describe()}")

        driven = await drive([Aim(server, MODEL, requests) for server in (devices[0], *sidecars)], due, tick)
    taken = await decisions(admin)
    # A sidecar remembers its last 4096 requests: those of the last two parts of the day.
    edges = [seconds * part / len(hours) for part in range(max(len(hours) - 2, 0), len(hours) + 1)]
    saved = await asyncio.to_thread(compare, tuned.admin, MODEL, counts[3], choices, edges)
    for client in (*clients, admin):
        await client.close()
    # 2. The results.
    names = ("no batching", "zero wait: 64, 0 ms", "fixed: 8, 2 ms", "Carpool, p99 only")
    arms = [
        Arm(name, one, seen, chosen, *_hours(one, seen, hours, seconds))
        for name, one, seen, chosen in zip(names, driven, counts, ((), (), (), choices), strict=True)
    ]
    said = [(_hour(at - started, seconds, hours), reason, message) for at, reason, message, change in taken if change]
    return Day(device, seconds, hours, arms, said, saved)


def _introduce(device: DeviceProfile, screen: Screen) -> None:
    """Show the times and the capacity of the device."""
    curve = device.service_time()
    screen.step(
        f"{escape(device.name)}: each time of the published profile x{SLOWER}, slept and not computed: "
        + ", ".join(f"{curve.time(rows) * 1e3:.0f} ms for {rows}" for rows in (1, 8, 64))
    )
    screen.note(
        "so it serves " + ", ".join(f"{rows / curve.time(rows):.0f}/s in batches of {rows}" for rows in (1, 8, 64))
    )


async def _servers(
    device: DeviceProfile, processes: Processes, screen: Screen
) -> tuple[list[Running], tuple[Running, Running, Running]]:
    """Start four devices, and a sidecar before each but the first: with zero wait, a typical setting, and Carpool."""
    slowed = processes.folder / "device.json"
    device_profile.save(device, slowed)
    devices = [await processes.standin(f"device-{name}", slowed) for name in ("alone", "zero-wait", "fixed", "carpool")]
    screen.step(f"without batching: clients ask the server at {devices[0].address} themselves")
    policy = {"policy": {"slo": {"latency": {"p99": format_seconds(SLO)}}}}
    upstreams = [{"upstream": {"url": f"http://{each.address}"}, **policy} for each in devices]
    zero_wait = await processes.sidecar("zero-wait", {**upstreams[1], "parameters": {"*": ZERO_WAIT}})
    screen.step(
        f"zero wait: a sidecar with maxBatch 64 that batches what waits for the device anyway, at {zero_wait.address}"
    )
    fixed = await processes.sidecar("fixed", {**upstreams[2], "parameters": {"*": FIXED}})
    screen.step(f"typical setting: a sidecar with maxBatch 8, maxWait 2ms, fixed, at {fixed.address}")
    tuned = await processes.sidecar("carpool", upstreams[3])
    screen.step(f"Carpool: a sidecar that knows a p99 of {format_seconds(SLO)} and nothing else, at {tuned.address}")
    return devices, (zero_wait, fixed, tuned)


def _counted(at: float, stats: dict[str, Any], curve: ServiceTime) -> Count:
    """Return what a device has counted so far."""
    batches = {int(rows): count for rows, count in stats["batches"].items()}
    return Count(
        at,
        sum(rows * count for rows, count in batches.items()),
        sum(batches.values()),
        sum(count * curve.time(rows) for rows, count in batches.items()),
        stats["busySeconds"],
    )


def _hour(at: float, seconds: float, hours: Sequence[tuple[str, float]]) -> str:
    return hours[min(int(at / seconds * len(hours)), len(hours) - 1)][0]


def slower(profile: DeviceProfile) -> DeviceProfile:
    """Return a profile with every time ``SLOWER`` times as long."""
    return replace(
        profile,
        name=f"{profile.name}, x{SLOWER}",
        source=f"{profile.source}; every time x{SLOWER}",
        seconds=tuple(seconds * SLOWER for seconds in profile.seconds),
    )


def _hours(
    driven: Driven, counts: Sequence[Count], hours: Sequence[tuple[str, float]], seconds: float
) -> tuple[list[Hour], Hour]:
    share = seconds / len(hours)

    def part(name: str, rate: float, start: float, stop: float) -> Hour:
        first = max((count for count in counts if count.at <= start), default=counts[0])
        last = next((count for count in counts if count.at >= stop), counts[-1])
        return Hour(
            name,
            rate,
            report_on(driven.recording, start, stop - start, SLO),
            (last.seconds - first.seconds) / max(last.rows - first.rows, 1),
            (last.rows - first.rows) / max(last.batches - first.batches, 1),
            (last.seconds - first.seconds) / max(last.at - first.at, 1e-9),
        )

    parts = [part(name, rate, i * share, (i + 1) * share) for i, (name, rate) in enumerate(hours)]
    return parts, part("all day", sum(rate for _, rate in hours) / len(hours), 0.0, seconds)
