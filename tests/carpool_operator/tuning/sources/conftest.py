"""What Prometheus stores of a sidecar, made by hand."""

from __future__ import annotations

from itertools import accumulate

import pytest

from carpool.batching.counters import DURATION_BOUNDS, ROW_BOUNDS, ModelStats
from carpool_operator.tuning.sources.scrapes import (
    BATCHABLE,
    CELLS,
    COUNTS,
    DURATIONS,
    GAPS_SQUARED,
    MISSES,
    MODE,
    REQUEST_ROWS,
    STARTED,
)

EDGES = [*(f"{bound:.6g}" for bound in DURATION_BOUNDS), "+Inf"]
ROW_EDGES = [*map(str, ROW_BOUNDS), "+Inf"]
OF_POD = {"namespace": "shop", "pod": "resnet-0", "container": "carpool", "instance": "10.244.0.9:14090"}


def model_stats(**counts):
    counts = {"arrivals": 10, "arrivals_squared": 60, "windows": 7, "rows": 12, "dispatched": 10, **counts}
    counts = {
        "batchable": 8,
        "served": 10,
        "hits": 9,
        "queue_seconds": 0.25,
        "gaps_squared": 0.75,
        "misses": {"late": 1},
        **counts,
    }
    durations = [0] * len(EDGES)
    durations[20], durations[-1] = counts["served"] - 1, 1
    cells = [(0, 4, 1, 0, 3, 0.03, 0.0004), (0, 1, 2, 1, 1, 0.01, 0.0001)]
    by_rows = [counts["arrivals"] - 1, 0, 1, *[0] * (len(ROW_EDGES) - 3)]
    return ModelStats(**{"durations": durations, "request_rows": by_rows, "cells": cells, **counts})


def scrape(models=None, *, started=1000.0, generation=7, **process):
    """One scrape, by metric and own labels."""
    models = {"m": model_stats()} if models is None else models
    process = {
        "config_generation": generation, "config_running": generation - 1,
        "device_busy_seconds_total": 0.04, "queue_rows": 3, "queue_bytes": 300,
        "in_flight_batches": 1, "model_ready": 1, "host_stalls_total": 2, "host_stall_seconds_total": 0.5, **process,
    }  # fmt: skip
    found = {(f"carpool_{name}", ()): value for name, value in process.items()}
    found[STARTED, ()] = started
    for model, stats in models.items():
        own = (("model", model),)
        for field, name in (*COUNTS.items(), ("batchable", BATCHABLE), ("gaps_squared", GAPS_SQUARED)):
            found[name, own] = getattr(stats, field)
        found["carpool_queue_wait_seconds_sum", own] = stats.queue_seconds
        found["carpool_max_batch", own] = 8
        found["carpool_max_wait_seconds", own] = 0.002
        found["carpool_max_in_flight", own] = 2
        found["carpool_model_replaced_total", own] = 3
        for mode, active in (("batching", 1), ("pass-through", 0)):
            found[MODE, (*own, ("mode", mode))] = active
        for reason, count in stats.misses.items():
            found[MISSES, (*own, ("reason", reason))] = count
        for edge, count in zip(EDGES, accumulate(stats.durations), strict=True):
            found[DURATIONS, (*own, ("le", edge))] = count
        for edge, count in zip(ROW_EDGES, accumulate(stats.request_rows), strict=True):
            found[REQUEST_ROWS, (*own, ("le", edge))] = count
        for bucket, rows, in_flight, executors, *values in stats.cells:
            kind = (
                ("bucket", str(bucket)), ("rows", str(rows)), ("in_flight", str(in_flight)),
                ("executors", str(executors)),
            )  # fmt: skip
            for name, value in zip(CELLS, values, strict=True):
                found[name, (*own, *kind)] = value
    return found


def matrix(scrapes, **labels):
    """Scrapes by their time, as the result of a range selector."""
    series = {}
    for at, found in scrapes.items():
        for (name, own), value in found.items():
            series.setdefault((name, own), []).append([at, f"{value!r}" if isinstance(value, float) else str(value)])
    return [
        {"metric": {"__name__": name, **OF_POD, **labels, **dict(own)}, "values": values}
        for (name, own), values in series.items()
    ]


def vector(asked, ages, **labels):
    """Ages by pod, as the result of an expression."""
    return [{"metric": {**OF_POD, **labels, "pod": pod}, "value": [asked, str(age)]} for pod, age in ages.items()]


@pytest.fixture
def stored():
    """The four above, by name."""

    class Stored:
        pass

    made = Stored()
    made.model_stats, made.scrape, made.matrix, made.vector = model_stats, scrape, matrix, vector
    return made
