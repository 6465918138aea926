"""The verification record of one model version: a check for each form of its requests, and what refuted it."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from carpool_sidecar.axis_verification.check import Check

if TYPE_CHECKING:
    from carpool.policy.spec import SequenceAxis
    from carpool_sidecar.axis_verification.samples import Shelf

UNVERIFIED = "axis-unverified"
"""The reason of requests that are not batched until their batches were verified."""

REFUTED = "axis-refuted"
"""The reason of requests whose model gave rows other answers in a batch than without batching."""

MAX_FORMS = 16
"""Most unverified, and most verified, forms at a time: callers can invent forms, a parameter is enough."""

FREE_ROWS = 128
"""Rows that trials may have before the share below counts."""
SHARE = 0.01
"""Share of the rows served that trials may have in addition."""


class Verified(StrEnum):
    """The verification state of a model's requests."""

    UNVERIFIED = "unverified"
    VERIFIED = "verified"
    REFUTED = "refuted"
    ASSERTED = "asserted"
    """The policy asserts the axis: checks are only reported."""
    CONTRADICTED = "contradicted"
    """The policy asserts the axis, but a batch gave another answer: requests are still merged."""
    OFF = "off"
    """Nothing is checked: the policy trusts the server's metadata, or there is nothing to merge."""


class Record:
    """The checks of one model version, and the rows that they used."""

    __slots__ = ("checks", "disagreed", "looks", "refused", "rows")

    def __init__(self) -> None:
        self.checks: dict[object, Check] = {}
        self.looks = 0
        """Answers that were examined, of all forms: those that were replaced, too."""
        self.rows = 0
        """Rows of trials."""
        self.refused: int | None = None
        """Rows of the smallest batch of copies that was answered with an error."""
        self.disagreed = ""
        """Where an answer in a batch differed from one without batching; "" while none did."""

    def admit(
        self, form: object, tolerance: float, shelf: Shelf, *, asserted: bool, sequence: SequenceAxis | None = None
    ) -> Check:
        """Begin a check; if there are too many, it replaces the least advanced one."""
        rivals = [key for key, check in self.checks.items() if check.verified == asserted]
        if len(rivals) >= MAX_FORMS:
            least = min(rivals, key=lambda key: self.checks[key].pace.answers)
            self.checks.pop(least).samples.clear()
        check = self.checks[form] = Check(tolerance, shelf, asserted=asserted, sequence=sequence)
        return check

    def room(self, served: int) -> int:
        """Return the rows that trials may have now, if the model has ``served`` so many."""
        return int(FREE_ROWS + SHARE * served) - self.rows

    def clear(self) -> None:
        """Drop all kept requests."""
        for check in self.checks.values():
            check.samples.clear()

    @property
    def state(self) -> Verified:
        """The state of the most advanced form."""
        if self.disagreed:
            return Verified.REFUTED
        return Verified.VERIFIED if any(check.verified for check in self.checks.values()) else Verified.UNVERIFIED

    @property
    def evidence(self) -> str:
        """A sentence on it."""
        if self.disagreed:
            return self.disagreed
        check = self._farthest
        return "not verified yet: no single request was answered with success" if check is None else check.evidence

    @property
    def padding(self) -> str:
        """A sentence on whether requests of different lengths share batches; about a form that doesn't, if any."""
        refuted = next((check for check in self.checks.values() if check.padding.refuted), self._farthest)
        return "" if refuted is None else refuted.padding.evidence(refuted.trouble)

    @property
    def _farthest(self) -> Check | None:
        checks = self.checks.values()
        return min(checks, key=lambda check: (not check.verified, -check.agreed, -check.pace.answers), default=None)
