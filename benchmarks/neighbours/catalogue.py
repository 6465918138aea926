"""The neighbours, by name.

`python -m neighbours.catalogue NAME PORT SECONDS` runs one of them in a process of its own, so that its work does not
delay the healthy callers' clock, and prints what it met with.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import sys
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import uvloop

from neighbours import hostile
from neighbours.model import BROKEN, REFUSED, SHORT

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

RATE = 200.0
"""Healthy requests a second."""


class Neighbour(NamedTuple):
    """A kind of caller. ``act`` misbehaves at a port until it is cancelled."""

    name: str
    what: str
    act: Callable[[int], Coroutine[None, None, None]]


async def _nobody(_: int) -> None:
    await asyncio.sleep(3600)


def _bodies(name: str, what: str, make: Callable[[], bytes]) -> Neighbour:
    return Neighbour(name, what, partial(hostile.bodies, make=make))


def _poison(first: int, percent: float, what: str) -> Neighbour:
    name = "short" if first == SHORT else f"poison-{-first}"
    act = partial(hostile.poison, first=first, share=percent / 100, rate=RATE)
    return Neighbour(f"{name}-{percent:g}", f"{percent:g} % of requests {what}", act)


NEIGHBOURS = (
    Neighbour("none", "nobody: what healthy callers get", _nobody),
    _bodies("inputs", "a body with 40,000 inputs, twice a second", partial(hostile.inputs, 40_000)),
    _bodies("bomb-escapes", "a string of escapes, 62 MB, twice a second", hostile.escapes),
    _bodies("bomb-empty", 'a row `["","",...]`, 62 MB, twice a second', hostile.empty_strings),
    _bodies("bomb-flat", "rows `1,1,...`, 62 MB, twice a second", hostile.flat),
    _bodies("bomb-keys", "five million keys, 62 MB, twice a second", hostile.keys),
    _bodies("bomb-bytes", "BYTES in JSON, 62 MB, twice a second", hostile.json_bytes),
    Neighbour("unfinished", "12 bodies of 62 MB whose last byte never comes", hostile.unfinished),
    *(
        _poison(first, percent, f"are answered with {-first}")
        for first in (REFUSED, BROKEN)
        for percent in (0.3, 1, 3, 10)
    ),
    *(_poison(SHORT, percent, "have no row in the answer") for percent in (0.3, 3)),
    Neighbour("hanging", "4 callers of another model that never answers", hostile.hanging),
    Neighbour("streams", "300 forwarded streams", hostile.streams),
    Neighbour("uploads", "300 slow uploads", hostile.uploads),
    Neighbour("slow-loris", "1,800 connections that never finish a request", hostile.slow_loris),
    Neighbour("cancels", "200 requests a second whose callers hang up", hostile.cancels),
    Neighbour("flood", "one caller, 8 times the capacity, told by its Authorization", hostile.flood),
    Neighbour("flood-low", "8 times the capacity, at low priority", partial(hostile.flood, low=True)),
    Neighbour("interim", "answers that begin with 103 without end", hostile.interim),
    Neighbour("large", "answers of 400 MB", hostile.large),
)


async def _act(neighbour: Neighbour, port: int, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await neighbour.act(port)


def main() -> None:
    """Run a neighbour."""
    name, port, seconds = sys.argv[1:]
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    neighbour = next(neighbour for neighbour in NEIGHBOURS if neighbour.name == name)
    uvloop.run(_act(neighbour, int(port), float(seconds)))
    print(json.dumps(hostile.outcomes))


if __name__ == "__main__":
    main()
