"""Counts of requests and batches, for metrics and reports. The counters for the tuner are in the Batcher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from carpool_sidecar.models import OTHER

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_FRAGMENT_NAMES = 32
"""Most header names counted separately; callers can invent names."""


class RequestCounts:
    """Counts of one sidecar, by model unless noted otherwise."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, str, int], int] = {}
        """By model, protocol and status."""
        self.duration_seconds: dict[str, float] = {}
        """Sum of the seconds from arrival to successful answer."""
        self.batch_sizes: dict[tuple[str, int], int] = {}
        """Batches sent, by model and exponent of the rows rounded up to a power of two: that bounds the keys."""
        self.batch_rows: dict[str, int] = {}
        """Rows of the batches sent."""
        self.alone: dict[tuple[str, str], int] = {}
        """Requests that may not be merged, by model and reason."""
        self.why: dict[tuple[str, str], str] = {}
        """Details on the last of these requests, if the reason alone does not explain it; same keys."""
        self.apart_at: dict[str, float] = {}
        """When a request of a failing caller was last kept apart, by model."""
        self.unpadded: dict[tuple[str, str], int] = {}
        """Requests of models with a sequence axis that are only batched with requests of equal length; same keys."""
        self.tokens: dict[str, tuple[int, int]] = {}
        """For models with a sequence axis: tokens sent (rows times their own length), and tokens added by padding."""
        self.fragments: dict[str, int] = {}
        """How often two consecutive requests could not be batched because of a header, by its name."""

    def answered(self, model: str, protocol: str, status: int) -> None:
        """Count an answer."""
        key = (model, protocol, status)
        self.answers[key] = self.answers.get(key, 0) + 1

    def failed_all(self, model: str) -> str:
        """Return a sentence on the answers to a model's requests if there was none with success; else ""."""
        answers: dict[int, int] = {}
        for (name, _, status), count in self.answers.items():
            if name == model:
                answers[status] = answers.get(status, 0) + count
        if not answers or any(200 <= status < 300 for status in answers):
            return ""
        counted = ", ".join(f"{count} with {status}" for status, count in sorted(answers.items()))
        return f"no request was answered with success: {counted}"

    def took(self, model: str, seconds: float) -> None:
        """Add the seconds from a request's arrival to its successful answer."""
        self.duration_seconds[model] = self.duration_seconds.get(model, 0.0) + seconds

    def sent(self, model: str, rows: int) -> None:
        """Count a batch."""
        size = (model, (rows - 1).bit_length())
        self.batch_sizes[size] = self.batch_sizes.get(size, 0) + 1
        self.batch_rows[model] = self.batch_rows.get(model, 0) + rows

    def not_merged(self, model: str, reason: str, why: str) -> int:
        """Count a request that may not be merged; return the count for this reason."""
        key = (model, reason)
        count = self.alone[key] = self.alone.get(key, 0) + 1
        if why:
            self.why[key] = why
        return count

    def not_padded(self, model: str, reason: str) -> None:
        """Count a request that is only batched with requests of equal length."""
        key = (model, reason)
        self.unpadded[key] = self.unpadded.get(key, 0) + 1

    def padded(self, model: str, own: int, added: int) -> None:
        """Add a batch's own tokens and the tokens that padding added."""
        before, added_before = self.tokens.get(model, (0, 0))
        self.tokens[model] = (before + own, added_before + added)

    def separated(self, headers: Iterable[str]) -> None:
        """Count the headers in which a request differs from the one before it."""
        for name in headers:
            known = name if name in self.fragments or len(self.fragments) < MAX_FRAGMENT_NAMES else "other"
            self.fragments[known] = self.fragments.get(known, 0) + 1

    def forget(self, model: str) -> None:
        """Forget a model that does not exist; its answers are counted under ``OTHER``."""
        for protocol, status in [key[1:] for key in self.answers if key[0] == model]:
            count = self.answers.pop((model, protocol, status))
            key = (OTHER, protocol, status)
            self.answers[key] = self.answers.get(key, 0) + count
        self.alone = {key: count for key, count in self.alone.items() if key[0] != model}
        self.why = {key: why for key, why in self.why.items() if key[0] != model}
        self.batch_sizes = {key: count for key, count in self.batch_sizes.items() if key[0] != model}
        self.unpadded = {key: count for key, count in self.unpadded.items() if key[0] != model}
        self.batch_rows.pop(model, None)
        self.apart_at.pop(model, None)
        self.tokens.pop(model, None)
        self.duration_seconds.pop(model, None)
