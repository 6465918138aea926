"""Jobs in the live view and in ``explain``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from carpool_cli.live.figures import number

if TYPE_CHECKING:
    from carpool.exchange.report import Jobs


def jobs_line(jobs: Jobs | None) -> str:
    """Return the counts of stored jobs and of requests at the model; "" if jobs are off."""
    if jobs is None:
        return ""
    states = ", ".join(f"{number(count)} {state}" for state, count in jobs.states.items()) or "none"
    lines = f"; {number(jobs.lines)} lines of batches to be answered" if jobs.lines else ""
    size = f"{jobs.bytes / 2**20:,.1f} of {jobs.max_bytes / 2**20:,.0f} MiB"
    full = " (full: none is started)" if jobs.bytes >= jobs.max_bytes else ""
    return f"{states}{lines}; {jobs.in_flight} with the model, {jobs.limit} at most now; {size}{full}"
