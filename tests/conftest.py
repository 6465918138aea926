"""What holds for all tests."""

from __future__ import annotations

import asyncio

# Before its first async test pytest-asyncio asks for the current loop and, up to Python 3.11, gets a new one that none
# closes: a warning, so an error, in whichever test the garbage is collected. Once set to None there is none to get.
asyncio.set_event_loop(None)
