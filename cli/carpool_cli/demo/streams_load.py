"""Load for the model of `random_model`: requests of many lengths, at a rate, or with a fixed concurrency."""

from __future__ import annotations

import asyncio
import random
import time
from typing import NamedTuple

import msgspec

from carpool_cli.demo.random_model import CONSONANTS, VOWELS
from carpool_cli.load.streaming import StreamGenerator, StreamRecording

PATH = "/v1/completions"

PROMPT, OUTPUT = (4.2, 0.7), (3.5, 0.5)
"""Lengths in tokens: log of the median, and spread. Medians are 67 and 33."""

ENDING = 8.0
"""Seconds after the last request in which answers still count."""


class Lengths(NamedTuple):
    """Of a request, in tokens."""

    prompt: int
    output: int


def lengths(rng: random.Random) -> Lengths:
    """Draw a request."""
    return Lengths(
        min(400, max(8, round(rng.lognormvariate(*PROMPT)))), min(200, max(2, round(rng.lognormvariate(*OUTPUT))))
    )


def body(asked: Lengths, rng: random.Random, **more: object) -> bytes:
    """Make up a request: a token for every syllable, and no two prompts alike."""
    prompt = "".join(f" {rng.choice(CONSONANTS)}{rng.choice(VOWELS)}" for _ in range(asked.prompt))
    fields = {"prompt": prompt, "max_tokens": asked.output, "stream": True, "stream_options": {"include_usage": True}}
    return msgspec.json.encode(fields | more)


async def at_once(host: str, port: int, clients: int, seconds: float, seed: int) -> float:
    """Return the answers per second with a number of clients. Each sends its next request at once.

    The first third of the time does not count: until then few answers end, because all requests begin together.
    """
    rng = random.Random(seed)  # noqa: S311 - load, not secrets
    done, stop = 0, time.monotonic() + seconds
    counted = stop - seconds * 2 / 3

    async def ask() -> None:
        nonlocal done
        while time.monotonic() < stop:
            bodies = [body(lengths(rng), rng)]
            await StreamGenerator(host, port, PATH, bodies, [0.0], timeout=120.0, headers=[]).run()
            done += counted <= time.monotonic() < stop

    await asyncio.gather(*(ask() for _ in range(clients)))
    return done / (stop - counted)


def arrivals(host: str, port: int, rate: float, seconds: float, seed: int) -> StreamGenerator:
    """Return a generator of requests at random times at a mean rate; the same seed gives the same requests."""
    rng = random.Random(seed)  # noqa: S311 - load, not secrets
    due: list[float] = []
    bodies: list[bytes] = []
    now = rng.expovariate(rate)
    while now < seconds or not due:
        due.append(now)
        bodies.append(body(lengths(rng), rng))
        now += rng.expovariate(rate)
    return StreamGenerator(host, port, PATH, bodies, due, timeout=60.0, headers=[])


async def offered(generator: StreamGenerator, seconds: float) -> StreamRecording:
    """Send them; clients without a complete answer ``ENDING`` seconds after the last request disconnect."""
    stop = asyncio.get_running_loop().call_later(seconds + ENDING, generator.stop)
    try:
        return await generator.run()
    finally:
        stop.cancel()
