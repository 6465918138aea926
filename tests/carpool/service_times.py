"""Batches with known times, as the counters record them, for the tests of what is learned of batch latency."""

from __future__ import annotations

from bisect import bisect_right

from carpool.batching.counters import SUPPOSED, Sample


def affine(rows):
    return 0.005 + 0.0005 * rows


def sample(rows, seconds, in_flight=1):
    return Sample(0, rows, in_flight, 0, len(seconds), sum(seconds), sum(x * x for x in seconds))


def cells(batches, bucket=0):
    """Cells of (rows, in_flight, seconds) or (rows, in_flight, seconds, supposed concurrency)."""
    found = {}
    for rows, in_flight, seconds, *executors in batches:
        kind = bucket, rows, in_flight, *(executors or [0])
        count, busy, squared = found.get(kind, (0, 0.0, 0.0))
        found[kind] = count + 1, busy + seconds, squared + seconds * seconds
    return [Sample(*kind, *sums) for kind, sums in found.items()]


def noisy(rng, mean, cv):
    return mean if cv == 0 else rng.gammavariate(cv**-2, mean * cv**2)


def device(executors, slots, seconds, rng, *, rate, batch=1, cv=0.0, curve=affine):
    """Batches as a device serves them and as the counters record them: (rows, in_flight, seconds, supposed)."""
    slot_free, executor_free = [0.0] * slots, [0.0] * executors
    batches = []
    now = 0.0
    while now < seconds:
        now += rng.expovariate(rate)
        now = dispatch = max(now, min(slot_free))
        rows = rng.randint(1, batch)
        executor = executor_free.index(min(executor_free))
        finish = max(dispatch, executor_free[executor]) + noisy(rng, curve(rows), cv)
        executor_free[executor] = slot_free[slot_free.index(min(slot_free))] = finish
        batches.append((dispatch, rows, finish))
    completions = sorted(finish for _, _, finish in batches)
    seen = []
    for index, (dispatch, rows, finish) in enumerate(batches):
        completed = bisect_right(completions, dispatch)
        in_flight = index - completed + 1
        seen.append((rows, in_flight, finish - dispatch, 0))
        if bisect_right(completions, finish) - 1 - completed < in_flight - 1:
            # It overtook one that was dispatched before it.
            seen.append((rows, in_flight, finish - dispatch, in_flight))
        for supposed in SUPPOSED:
            if supposed < in_flight:
                began = completions[completed + in_flight - supposed - 1]
                seen.append((rows, in_flight, max(finish - began, 0.0), supposed))
    return seen
