"""Which models are not batched, and why, from a sidecar's report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from carpool.exchange.decision import Reason
from carpool.exchange.report import OTHER, Report
from carpool.policy.durations import format_seconds
from carpool_cli.live.figures import duration

if TYPE_CHECKING:
    from collections.abc import Collection

    from carpool.exchange.report import ModelEntry
    from carpool_cli.live.admin_client import Explained


NEARLY_ALL = 0.9
"""Share of a model's requests from which their own reason stands for the model's."""

OF_REQUESTS = {
    "malformed": "not valid in the protocol; if the server refuses them too, correct the client",
    "limits": "larger than what is read for batching; raise the limit, or use binary tensors",
    "empty": "without rows or inputs, or with a dimension of 0",
    "encoded": "compressed (content-encoding); send them uncompressed",
    "content-type": "not JSON in UTF-8, or a CloudEvent; send `content-type: application/json`",
    "no-rows": 'without an array of rows; only `{"instances": [...]}` or `{"inputs": [...]}` can be batched',
    "columns": "columns, not rows; send `instances`",
    "mixed-rows": "rows of different shapes or kinds; send them one by one",
    "large-integers": "whole numbers beyond 64 bits; send them as strings, or use V2 with a datatype",
    "surrogates": "strings with half a UTF-16 surrogate pair; correct the client",
    "raw": "Triton's raw binary requests; use binary tensors",
    "sequence": "parts of a sequence, for which the server keeps state",
    "shared-memory": "tensors in shared memory; send them in the body",
    "classification": "requests for Triton's classification output, which has other rows",
    "unequal-rows": "inputs that differ in dim 0",
    "scalar": "inputs without dimensions",
    "nesting": "data with another nesting than its shape; send it flat, or nested like the shape",
    "kinds": "elements of another kind than the datatype's; use binary tensors",
}
"""What requests are that can't be batched, whatever the model's axis, and the fix; as in docs/protocols.md."""


def too_slow(report: Report) -> list[str]:
    """Return a line for each model whose batches of one row take longer than the SLO: batching does not help it."""
    return [
        f"{name or 'model'}  takes {duration(lane.service_seconds[1])} for one row: no setting meets the SLO of "
        f"{format_seconds(report.slo_seconds)}; raise it, or make the model faster"
        for name, lane in report.lanes.items()
        if lane.executors and lane.service_seconds is not None and lane.service_seconds[1] > report.slo_seconds
    ]


def not_merged(report: Report) -> list[str]:
    """Return a line for each model that can't be batched or is not verified, was refuted, or may be misspelt.

    A model whose requests are padded for batching has a line about that.
    """
    lines = []
    for entry in report.models:
        name = f"{entry.name or 'model'}{f' version {entry.version}' if entry.version else ''}"
        if entry.trouble:
            lines.append(f"{name}  {entry.trouble}")
        if (cause := _by_requests(report, entry)) and entry.verified in {"", "off", "unverified"}:
            lines.append(f"{name}  is not batched: {cause}")
            continue
        fix = f"carpool up --axis {entry.name}=First"
        if entry.verified in {"unverified", "refuted", "contradicted"}:
            lines.append(f"{name}  batches {entry.verified}: {entry.evidence}")
            lane = report.lanes.get(entry.lane)
            if entry.verified == "contradicted" and lane is not None and lane.quarantined:
                lines[-1] += "; its requests are sent alone"
            elif entry.verified == "contradicted":
                lines[-1] += (
                    "; its requests are merged all the same: to stop that, remove the model's `axis: First` from the "
                    f"policy, or --axis {entry.name}=First"
                )
            elif entry.verified == "unverified" and not entry.trouble:
                lines[-1] += (
                    "; to batch without that, if dim 0 of every tensor is the batch, and no row's answer depends on "
                    f"the other rows of its batch: {fix}"
                )
        elif "check its name" in entry.axis:
            lines.append(f"{name}  is only in the policy: {entry.axis}")
        elif not entry.merges:
            lines.append(f"{name}  is not batched: {entry.axis}")
            if "axis: First" in entry.axis:
                lines[-1] += f", or start it with: {fix}"
        if entry.padding:
            lines.append(f"{name}  padding {entry.padding}")
    return lines


def _by_requests(report: Report, entry: ModelEntry) -> str:
    """Return why nearly all requests to a model can't be batched, whatever its axis; ``""``: they can, or none came."""
    causes = [
        each
        for each in report.alone
        if each.model == entry.lane and each.reason in OF_REQUESTS and "bodies." not in each.detail  # never read
    ]
    stats = report.stats.models.get(entry.lane)
    if (
        not causes
        or stats is None
        or not stats.arrivals
        or sum(each.requests for each in causes) < NEARLY_ALL * stats.arrivals
    ):
        return ""
    most = max(causes, key=lambda each: each.requests)
    detail = f" ({most.detail})" if most.detail else ""
    return f"{most.requests} of its {stats.arrivals} requests are {OF_REQUESTS[most.reason]}{detail}"


def too_large(report: Report, model: str) -> str:
    """Return why bodies for a model were forwarded without being read."""
    known = (each.detail for each in report.alone if each.model in {model, OTHER} and "bodies." in each.detail)
    return next(known, "the body exceeds bodies.maxRequest, or bodies.maxBuffered had no room")


def not_batched(report: Report) -> set[str]:
    """Return the models whose requests are never batched, whatever the tuner does."""
    merged = {entry.lane for entry in report.models if entry.merges}
    return {entry.lane for entry in report.models} - merged


def message_of(each: Explained, unbatched: Collection[str]) -> str:
    """Return a decision's message; for a model that is not batched at all, the gain does not apply."""
    if each.model in unbatched and each.decision.reason in {Reason.PASSES_THROUGH, Reason.NOTHING_BATCHABLE}:
        return "its requests are not batched: see the line on this model"
    return each.decision.message
