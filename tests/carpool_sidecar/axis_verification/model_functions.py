"""Models by what they do with the rows of a batch: functions of an array (rows, features) that give named outputs."""

from __future__ import annotations

import random

import numpy as np

WIDTH = 4


def _ranks(x):
    return np.argsort(np.argsort(x[:, 0], kind="stable"), kind="stable")


def _detections(x):
    """As detectors without a batch index do: so many boxes as there are, of all images one after the other."""
    boxes = [row[:2] + step for row in x for step in range(int(abs(row[0]) * 2) % 4)]
    return np.array(boxes, np.float32).reshape(-1, 2)


def _recurrent(x):
    state, out = np.zeros(WIDTH, np.float32), []
    for step in x:  # dim 0 is time
        state = np.tanh(0.5 * state + step)
        out.append(state)
    return np.stack(out)


def _attention(x):
    scores = np.exp(x @ x.T / 2)
    return scores / scores.sum(1, keepdims=True) @ x


def _padded(x):
    lengths = (x > 0).sum(1)
    out = np.zeros((len(x), max(int(lengths.max()), 1)), np.float32)
    for index, row in enumerate(x):
        kept = row[row > 0]
        out[index, : len(kept)] = kept
    return out


def _quantised(x):
    step = np.abs(x).max() / 7 + 1e-9  # 4 bits, of the batch's range
    return np.round(x / step) * step


def _pairs(x):
    """Pooled two by two."""
    padded = np.concatenate([x, x[-1:]]) if len(x) % 2 else x
    return padded.reshape(-1, 2, x.shape[1]).mean(1)


def _neighbours(x):
    """Each row averaged with the one beside it, as grouped statistics do."""
    partner = np.minimum(np.arange(len(x)) ^ 1, len(x) - 1)
    return (x + x[partner]) / 2


def _joined(x):
    whole = "|".join(f"{value:.3f}" for value in x[:, 0])
    return np.array([whole.encode()] * len(x), object)


def _halves(x):
    middle = len(x) // 2
    return np.concatenate([x[middle:], x[:middle]])


def _softmax(x, axis):
    powers = np.exp(x - x.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


NEVER = {
    "detections": _detections,
    "cumulative-sum": lambda x: np.cumsum(x, 0),
    "cumulative-maximum": lambda x: np.maximum.accumulate(x, 0),
    "batch-mean": lambda x: x - x.mean(0),
    "batch-variance": lambda x: (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-3),
    "batch-variance-alone": lambda x: x / np.sqrt(x.var() + 0.1),
    "softmax-over-batch": lambda x: _softmax(x, 0),
    "sorted-over-batch": lambda x: np.sort(x, 0),
    "rows-sorted": lambda x: x[np.argsort(x[:, 0], kind="stable")],
    "ranks": _ranks,
    "one-hot-of-rank": lambda x: np.eye(16, dtype=np.float32)[np.minimum(_ranks(x), 15)],
    "largest-of-batch": lambda x: (x == x.max(0)).astype(np.float32),
    "argmax-over-batch": lambda x: x.argmax(0).reshape(1, -1),
    "distinct-rows": lambda x: np.unique(x, axis=0),
    "reversed": lambda x: x[::-1].copy(),
    "rolled": lambda x: np.roll(x, 1, 0),
    "halves-swapped": _halves,
    "running-mean": lambda x: np.cumsum(x, 0) / np.arange(1, len(x) + 1)[:, None],
    "differences": lambda x: np.diff(x, axis=0, prepend=np.zeros((1, WIDTH), np.float32)),
    "attention-over-batch": _attention,
    "time-major-rnn": _recurrent,
    "transposed": lambda x: x.T.copy(),
    "scalar": lambda x: x.sum(),
    "one-row": lambda x: x.mean(0, keepdims=True),
    "as-many-rows-as-ever": lambda x: np.resize(x.sum(0), (3, 2)),
    "padded-to-longest": _padded,
    "scaled-by-batch": lambda x: x / np.abs(x).max(),
    "quantised-by-batch": _quantised,
    "divided-by-rows": lambda x: x / len(x),
    "best-two": lambda x: x[np.argsort(-x[:, 0])[:2]],
    "doubled": lambda x: np.repeat(x, 2, 0),
    "pooled-in-pairs": _pairs,
    "averaged-with-neighbour": _neighbours,
    "cut-to-four": lambda x: x[:4],
    "joined-texts": _joined,
    "first-row-for-all": lambda x: np.repeat(x[:1], len(x), 0),
    "last-row-for-all": lambda x: np.repeat(x[-1:], len(x), 0),
    "position-in-batch": lambda x: x + np.arange(len(x))[:, None],
    "gated-by-batch": lambda x: x * (x.max() > 2),
}
"""Models whose answer to a row depends on the rows beside it, or has no row of its own for it."""


def counting():
    """Make a model with a state: each call counts."""
    calls = 0

    def count(x):
        nonlocal calls
        calls += 1
        return x + calls

    return count


def sampling():
    """Make a model that draws from a distribution."""
    rng = random.Random(16)
    return lambda x: np.array([rng.choice(range(50)) for _ in x]).reshape(-1, 1)


UNREPEATABLE = {"counter": counting, "sampling": sampling}
"""Makers of models that give another answer to the same request."""

_rng = np.random.default_rng(16)
_WEIGHTS = _rng.normal(size=(WIDTH, 5)).astype(np.float32)


def _texts(x):
    return np.array([f"row {value:.4f} \u00e9".encode() for value in x.sum(1)], object)


GOOD = {
    "linear": lambda x: x @ _WEIGHTS,
    "softmax": lambda x: _softmax(x @ _WEIGHTS, 1),
    "embeddings": lambda x: np.tanh(x @ np.repeat(_WEIGHTS, 40, 1)),
    "classes": lambda x: (x @ _WEIGHTS).argmax(1),
    "half-precision": lambda x: (x @ _WEIGHTS).astype(np.float16),
    "texts": _texts,
    "layer-norm": lambda x: (x - x.mean(1, keepdims=True)) / (x.std(1, keepdims=True) + 1e-3),
    "regression": lambda x: (x @ _WEIGHTS)[:, :1],
    "several-outputs": lambda x: {"scores": x @ _WEIGHTS, "label": (x @ _WEIGHTS).argmax(1), "text": _texts(x)},
    "rounding-noise": lambda x: x @ _WEIGHTS * (1 + 1e-5 * len(x)),
}
"""Models whose rows have nothing to do with each other."""
