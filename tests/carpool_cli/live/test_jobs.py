from __future__ import annotations

from carpool.exchange.report import Jobs
from carpool_cli.live.jobs import jobs_line


def test_jobs_are_shown_with_what_bounds_them():
    jobs = Jobs(states={"queued": 3, "done": 1200}, lines=0, bytes=5 * 2**19, max_bytes=2**30, in_flight=1, limit=4)
    assert jobs_line(jobs) == "3 queued, 1,200 done; 1 with the model, 4 at most now; 2.5 of 1,024 MiB"
    full = Jobs(states={}, lines=7, bytes=2**20, max_bytes=2**20, in_flight=0, limit=1)
    assert jobs_line(full) == (
        "none; 7 lines of batches to be answered; 0 with the model, 1 at most now; 1.0 of 1 MiB (full: none is started)"
    )
    assert jobs_line(None) == ""
