from __future__ import annotations

import asyncio
import weakref

from carpool_sidecar.jobs.storage.writer import Writer


class Result:
    """What some work returns; a body of many MiB would be counted as held for as long as it lives."""


async def test_a_result_lives_no_longer_than_its_caller_needs_it(disk):
    writer = Writer(disk().database.connection, lambda: None)
    alive = weakref.ref(await writer.do(Result))
    try:
        async with asyncio.timeout(5):
            while alive() is not None:  # noqa: ASYNC110 - the thread goes on to wait for work; there is no event
                await asyncio.sleep(0)
    finally:
        await writer.close()
