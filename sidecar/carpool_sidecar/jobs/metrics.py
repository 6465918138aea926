"""The metrics of jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from carpool_sidecar.jobs.records import State
from carpool_sidecar.metric import Metric

if TYPE_CHECKING:
    from carpool_sidecar.jobs.desk import Desk

METRICS = (
    Metric("jobs", "gauge", ("state",), "Jobs in the store, by state: queued, running, done, failed, cancelled"),
    Metric("jobs_batch_lines", "gauge", (), "Lines of batches that have no result yet"),
    Metric("jobs_bytes", "gauge", (), "Bytes of requests, files and results in the store, bounded by jobs.maxBytes"),
    Metric("jobs_in_flight", "gauge", (), "Jobs and lines of batches that are with the model"),
    Metric(
        "jobs_limit", "gauge", (), "Of these, as many as interactive requests leave room for, up to jobs.maxInFlight"
    ),
)


def fill(families: dict[str, Any], desk: Desk) -> None:
    """Add the present values."""
    totals = desk.store.totals
    for state in State:
        families["jobs"].add_metric([state], totals[state])
    families["jobs_batch_lines"].add_metric([], totals["lines"])
    families["jobs_bytes"].add_metric([], totals["bytes"])
    families["jobs_in_flight"].add_metric([], len(desk.runner.flights))
    families["jobs_limit"].add_metric([], desk.runner.headroom.limit)
