from __future__ import annotations

import asyncio

from carpool_sidecar.http1.timing import Ticker


async def test_it_ticks_until_the_callback_stops_it_and_starts_again():
    ticks = []
    three = asyncio.Event()

    def tick(now):
        ticks.append(now)
        if len(ticks) % 3 == 0:
            three.set()
        return len(ticks) % 3 != 0

    ticker = Ticker(0.001, tick, lambda: 5.0)
    for count in (3, 6):
        ticker.start()
        ticker.start()
        await three.wait()
        three.clear()
        assert ticks == [5.0] * count
    assert ticker._handle is None


async def test_stop():
    ticker = Ticker(0.0, lambda now: True, lambda: 0.0)
    ticker.stop()
    ticker.start()
    ticker.stop()
    assert ticker._handle is None
