"""The JSON of jobs, files and batches for callers. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from carpool_sidecar.jobs.records import Stage

if TYPE_CHECKING:
    from carpool_sidecar.jobs.records import Batch, File, Job


def shown_job(job: Job) -> dict[str, Any]:
    """Return a job as callers see it."""
    times = {"created": job.created, "expires": job.expires, "started": job.started, "ended": job.ended}
    rest = {"status": job.status, "reason": job.reason}
    return {
        "id": job.id,
        "state": job.state,
        "method": job.method,
        "path": job.target,
        "attempts": job.attempts,
        "rerun": job.rerun,
        **{name: round(value, 3) for name, value in times.items() if value is not None},
        **{name: value for name, value in rest.items() if value is not None},
    }


def shown_file(file: File) -> dict[str, Any]:
    """Return a file as clients see it."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size,
        "created_at": int(file.created),
        "expires_at": int(file.expires),
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
    }


def shown_batch(batch: Batch) -> dict[str, Any]:
    """Return a batch as clients see it."""
    ended = None if batch.ended is None else int(batch.ended)
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": None,
        "input_file_id": batch.file,
        "completion_window": batch.window,
        "status": batch.stage,
        "output_file_id": batch.output,
        "error_file_id": batch.errors,
        "created_at": int(batch.created),
        "in_progress_at": None if batch.started is None else int(batch.started),
        "expires_at": int(batch.expires),
        "finalizing_at": ended,
        "completed_at": ended if batch.stage is Stage.COMPLETED else None,
        "failed_at": None,
        "expired_at": ended if batch.stage is Stage.EXPIRED else None,
        "cancelling_at": None if batch.cancelling is None else int(batch.cancelling),
        "cancelled_at": ended if batch.stage is Stage.CANCELLED else None,
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": msgspec.Raw(batch.metadata),
    }


def shown_list(data: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    """Return a list as OpenAI's clients see it."""
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, "has_more": more, **ends}
