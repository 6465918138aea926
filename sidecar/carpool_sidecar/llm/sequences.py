"""One sequence inside the engine, and one that begins again where the engine lost it."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from carpool_sidecar.llm.messages import Sampling

PATIENCE = 60.0
"""Seconds that the engine may have no room for a sequence that it had accepted."""


class Handle(Protocol):
    """One sequence inside the engine."""

    def read(self) -> tuple[list[int], list[float], str]:
        """Return new tokens, their logarithmic probabilities, and why it ended: ``stop``, ``length``, ``lost``."""

    def cancel(self) -> None:
        """Compute it no more."""


Begin: TypeAlias = "Callable[[list[int], int, Sampling], Handle]"
"""Takes a sequence: its tokens, how many may come, and how they are chosen."""


class Patience(NamedTuple):
    """For how long a sequence that was lost begins again, and the clock to measure it with."""

    seconds: float
    clock: Callable[[], float]


class Lasting:
    """A sequence that begins again, with its tokens so far, where the engine lost it.

    If a step of OpenVINO's can't schedule anything, it drops all sequences. One that was cancelled keeps its blocks of
    the KV cache until the next step, so that happens to others after clients left a full cache.
    """

    __slots__ = ("_begin", "_clock", "_handle", "_ids", "_lost", "_new", "_patience", "_room", "_sampling")

    def __init__(self, begin: Begin, ids: list[int], room: int, sampling: Sampling, *, patience: Patience) -> None:
        """Begin. ``room``: tokens at most. Raises what ``begin`` does."""
        self._begin = begin
        self._sampling = sampling
        self._handle = begin(ids, room, sampling)
        self._ids = array("i", ids)
        self._new, self._room = 0, room
        self._patience, self._clock = patience.seconds, patience.clock
        self._lost: float | None = None
        """Since when it has been lost without another token."""

    def read(self) -> tuple[list[int], list[float], str]:
        """Return what is new; ``lost`` only when it has come to nothing for as long as the patience lasts."""
        ids, logprobs, end = self._handle.read()
        if ids:
            self._ids.extend(ids)
            self._new += len(ids)
            self._lost = None
        if end == "lost" and self._again():
            end = ""
        return ids, logprobs, end

    def cancel(self) -> None:
        """Compute it no more."""
        self._handle.cancel()

    def _again(self) -> bool:
        now = self._clock()
        if self._lost is None:
            self._lost = now
        if now - self._lost >= self._patience:
            return False
        sampling = self._sampling
        if self._new:  # other draws than those of its first tokens
            seed, least = (sampling.seed + self._new) % (1 << 31), max(0, sampling.min_tokens - self._new)
            sampling = msgspec.structs.replace(sampling, seed=seed, min_tokens=least)
        try:
            self._handle = self._begin(self._ids.tolist(), self._room - self._new, sampling)
        except Exception:  # noqa: BLE001 - whatever the runtime raises, this one can't go on, and the others can
            return False
        return True
