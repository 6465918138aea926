"""The metrics of jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from carpool_sidecar.jobs.records import State
from carpool_sidecar.metric import Metric

if TYPE_CHECKING:
    from carpool_sidecar.jobs.desk import Desk
    from carpool_sidecar.metric import Families

METRICS = (
    Metric("jobs", "gauge", ("state",), "Jobs in the store, by state: queued, running, done, failed, cancelled"),
    Metric("jobs_batch_lines", "gauge", (), "Lines of batches that have no result yet"),
    Metric("jobs_bytes", "gauge", (), "Bytes of requests, files and results in the store, bounded by jobs.maxBytes"),
    Metric("jobs_in_flight", "gauge", (), "Jobs and lines of batches that are with the model"),
    Metric(
        "jobs_limit", "gauge", (), "Of these, as many as interactive requests leave room for, up to jobs.maxInFlight"
    ),
)


def fill(families: Families, desk: Desk) -> None:
    """Add the present values."""
    totals = desk.store.totals
    for state in State:
        families.put("jobs", totals[state], state)
    families.put("jobs_batch_lines", totals["lines"])
    families.put("jobs_bytes", totals["bytes"])
    families.put("jobs_in_flight", len(desk.runner.flights))
    families.put("jobs_limit", desk.runner.headroom.limit)
