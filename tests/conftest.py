"""What holds for all tests."""

from __future__ import annotations

import asyncio
from collections import Counter

# Before its first async test pytest-asyncio asks for the current loop and, up to Python 3.11, gets a new one that none
# closes: a warning, so an error, in whichever test the garbage is collected. Once set to None there is none to get.
asyncio.set_event_loop(None)


def pytest_terminal_summary(terminalreporter):
    """Say what was skipped, and why: in a line of dots nobody sees it."""
    reasons = Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", ()))
    if reasons:
        terminalreporter.section("SKIPPED", yellow=True, bold=True)
    for reason, count in reasons.items():
        terminalreporter.line(f"{count} tests: {reason.removeprefix('Skipped: ')}", yellow=True)
