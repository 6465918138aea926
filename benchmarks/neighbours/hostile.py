"""The misbehaving neighbours: each is a coroutine that misbehaves at one port until it is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from random import Random
from typing import TYPE_CHECKING

from carpool.learning.arrivals import Poisson, until
from neighbours.line import Line
from neighbours.model import LARGE, V1_TARGET, V2_TARGET, head, post, v1, v2

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator

PATIENCE = 20.0
"""Seconds a neighbour waits for an answer."""

BOMB = 62_000_000
"""Bytes: within the default limit of a body, 64 MiB."""

LOST = (OSError, EOFError, TimeoutError)

outcomes: Counter[str] = Counter()
"""What became of this process's own requests: statuses, and how many broke off."""


async def each(count: int, work: Callable[[int], Coroutine[None, None, None]]) -> None:
    """Run ``work(0)`` to ``work(count - 1)`` at the same time."""
    async with asyncio.TaskGroup() as tasks:
        for number in range(count):
            tasks.create_task(work(number))


async def again(pause: float, work: Callable[[], Awaitable[None]]) -> None:
    """Do something over and over, ``pause`` seconds apart, whatever becomes of it."""
    while True:
        with trying():
            await work()
        await asyncio.sleep(pause)


@contextlib.contextmanager
def trying() -> Iterator[None]:
    """Count what breaks off, and go on."""
    try:
        yield
    except LOST:
        outcomes["broken off"] += 1


async def ask(port: int, message: bytes) -> None:
    """Send a request on a connection of its own, in pieces as they are taken, and wait for its answer."""
    with contextlib.closing(Line(port)) as line:
        async with asyncio.timeout(PATIENCE):
            for at in range(0, len(message), 1 << 20):
                await line.write(message[at : at + (1 << 20)])
            outcomes["sent"] += 1
            status, _ = await line.ask(b"")
            outcomes[str(status)] += 1


# ----------------------------------------------------------------------------------------------------- large bodies


def inputs(count: int) -> bytes:
    """Return a V2 request with so many inputs."""
    one = ",".join(f'{{"name":"x{index}","datatype":"INT64","shape":[1,2],"data":[1,2]}}' for index in range(count))
    return post(V2_TARGET % b"m", b'{"inputs":[%b]}' % one.encode())


def escapes() -> bytes:
    """Return a V1 request whose only row is a long string of escapes."""
    return _v1_bomb(b'["', rb"\u00e9", b'"]')


def empty_strings() -> bytes:
    """Return a V1 request whose only row has twenty million empty strings."""
    return _v1_bomb(b'["",', b'"",', b'""]')


def flat() -> bytes:
    """Return a V1 request of thirty million rows."""
    return _v1_bomb(b"1,", b"1,", b"1")


def keys() -> bytes:
    """Return a V1 request with five million other members."""
    # A thousand members at a time: written one by one they take seconds, in which nobody is harmed.
    thousand = b",".join(b'"####%03d":1' % index for index in range(1000))
    members = b",".join(thousand.replace(b"####", b"%04d" % index) for index in range(BOMB // 12_000))
    return post(V1_TARGET % b"m", b'{"instances":[[1,2]],%b}' % members)


def json_bytes() -> bytes:
    """Return a V2 request of fifteen million BYTES elements in JSON."""
    count = BOMB // 4
    form = b'{"inputs":[{"name":"x","datatype":"BYTES","shape":[1,%d],"data":["a"%b]}]}'
    return post(V2_TARGET % b"m", form % (count, b',"a"' * (count - 1)))


def _v1_bomb(begin: bytes, piece: bytes, end: bytes) -> bytes:
    return post(V1_TARGET % b"m", b'{"instances":[%b%b%b]}' % (begin, piece * (BOMB // len(piece)), end))


async def bodies(port: int, make: Callable[[], bytes]) -> None:
    """Two callers, each sends the same large body once a second."""
    message = make()
    await each(2, lambda _: again(1.0, lambda: ask(port, message)))


async def unfinished(port: int) -> None:
    """Twelve bodies of 62 MB whose last byte never comes: together more than may be buffered."""
    message = escapes()[:-1]
    await each(12, lambda _: again(1.0, lambda: ask(port, message)))


# ----------------------------------------------------------------------------------------------------- poison


async def poison(port: int, first: int, share: float, rate: float) -> None:
    """Rows that begin with ``first`` in so large a share of all requests; ``rate``: healthy requests a second."""
    rng = Random(7)

    async def one(serial: int) -> None:
        rows = [[first, serial]]
        with trying():
            await ask(port, (v1(rows) if serial % 2 else v2(rows)).message)

    await _open_loop(rate * share / (1 - share), rng, one)


async def _open_loop(rate: float, rng: Random, one: Callable[[int], Coroutine[None, None, None]]) -> None:
    start = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for serial, due in enumerate(until(Poisson(rate), 3600.0, rng)):
            await asyncio.sleep(start + due - time.monotonic())
            tasks.create_task(one(serial))


# ----------------------------------------------------------------------------------------------------- too much


async def cancels(port: int) -> None:
    """200 requests a second whose callers hang up within 150 ms, every other one with a header of its own."""
    rng = Random(8)

    async def one(serial: int) -> None:
        question = v1([[5, serial]])
        headers = b"X-Tenant: leaves\r\n" if serial % 2 else b""
        with trying(), contextlib.closing(Line(port)) as line:
            await line.write(post(question.target, question.body, headers))
            await asyncio.sleep(rng.uniform(0, 0.15))
            outcomes["left"] += 1

    await _open_loop(200.0, rng, one)


async def flood(port: int, *, low: bool = False) -> None:
    """One caller's 64 connections, each with up to ten requests of 32 rows a second: eight times the capacity.

    The caller is identified by an Authorization header; with ``low`` it only has a lower priority.
    """
    rows = [[7, index] for index in range(32)]
    question = v2(rows, priority=3) if low else v1(rows)
    message = post(question.target, question.body, b"" if low else b"Authorization: Bearer flood\r\n")

    async def one(_: int) -> None:
        line = Line(port)
        while True:
            start = time.monotonic()
            try:
                async with asyncio.timeout(PATIENCE):
                    answered = await line.ask(message)
                    outcomes[str(answered[0])] += 1
            except LOST:
                outcomes["broken off"] += 1
                line.close()
            await asyncio.sleep(max(start + 0.1 - time.monotonic(), 0.0))

    await each(64, one)


async def hanging(port: int) -> None:
    """Four callers of another model that never answers, in V1 and in V2."""
    rows = [[1, 1]]
    asked = [v1(rows, b"other").message, v2(rows, model=b"other").message] * 2
    await each(4, lambda number: again(0.1, lambda: ask(port, asked[number])))


# ----------------------------------------------------------------------------------------------------- connections


async def streams(port: int) -> None:
    """300 streams that never end."""
    await each(300, lambda _: again(0.5, lambda: _read(port, head(b"GET", b"/stream"))))


async def uploads(port: int) -> None:
    """300 uploads of 10 MB at 2 KB a second."""
    await each(300, lambda _: again(0.5, lambda: _dribble(port, _uploading, bytes(1024), 0.5)))


_uploading = head(b"POST", b"/upload", b"Content-Length: 10000000\r\n")


async def slow_loris(port: int) -> None:
    """1,800 connections: a third never ends its head, a third its body, a third sends a byte of it now and then."""
    began = (
        b"POST /v1/models/m:predict HTTP/1.1\r\nHost: mod",
        head(b"POST", V1_TARGET % b"m", b"Content-Length: 1000\r\n") + b'{"inst',
        b"",
    )

    async def one(number: int) -> None:
        await asyncio.sleep(number / 1800)
        message = began[number % 3]
        piece, pause = (b"", 5.0) if message else (b"P", 2.0)
        await again(1.0, lambda: _dribble(port, message, piece, pause))

    await each(1800, one)


async def _dribble(port: int, message: bytes, piece: bytes, pause: float) -> None:
    """Send something, then a piece of it after each pause, until the connection is cut."""
    with contextlib.closing(Line(port)) as line:
        reader, _ = await line.open()
        await line.write(message)
        outcomes["opened"] += 1
        while not reader.at_eof():
            await line.write(piece)
            await asyncio.sleep(pause)
    outcomes["cut"] += 1


# ----------------------------------------------------------------------------------------------------- odd answers


async def interim(port: int) -> None:
    """Four requests that the server answers with 103 without end, two of them for inference."""
    asked = [head(b"GET", b"/interim"), v1([[1, 1]], b"interim").message] * 2
    await each(4, lambda number: again(1.0, lambda: _read(port, asked[number])))


async def large(port: int) -> None:
    """Answers of 400 MB, forwarded (to one caller who reads and two who don't) and of inference, and one of 250 MB."""
    forwarded = head(b"GET", b"/large")
    inference = v1([[1, 1]], b"large").message
    fitting = v1([[1, 1]], b"fitting").message

    async def one(number: int) -> None:
        if number < 3:
            await again(0.5, lambda: _read(port, (forwarded, inference, fitting)[number]))
        else:
            await Line(port).write(forwarded)
            await asyncio.sleep(3600)

    await each(5, one)


async def _read(port: int, message: bytes) -> None:
    """Ask and read whatever comes, to the end of the connection or of the answer's 400 MB."""
    with contextlib.closing(Line(port)) as line:
        reader, _ = await line.open()
        await line.write(message)
        outcomes["opened"] += 1
        read = 0
        while read < LARGE and (piece := await reader.read(1 << 20)):
            read += len(piece)
            outcomes["bytes"] += len(piece)
    outcomes["cut"] += 1
