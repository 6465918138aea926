"""Signed changes, pushed or read from a mounted directory: which are accepted, and why others are refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from carpool_sidecar.admin.signatures import Refused

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

    from carpool.exchange.change import Change
    from carpool_sidecar.admin.signatures import Authority

BODY, SIGNATURE = "change.json", "change.sig"
"""The directory's files: those of the ConfigMap that the operator writes."""


class Found(NamedTuple):
    """The content of the directory: two files, ``None`` for a missing one; or why they can't be read."""

    body: bytes | None = None
    signature: bytes | None = None
    error: str = ""


class Changes:
    """Accepts changes that are newer than all before, pushed or from the directory.

    ``apply`` is called with each accepted one. ``newer_than`` returns the generation of the other source in force.
    """

    def __init__(
        self,
        authority: Authority,
        apply: Callable[[Change], None],
        newer_than: Callable[[], int],
        log: logging.Logger,
        directory: Path | None = None,
    ) -> None:
        self.authority = authority
        self.directory = directory
        self.in_force: Change | None = None
        """The newest one, unless a newer configuration file is in force."""
        self.newest = 0
        """Generation of the newest one so far, in force or not: older ones are outdated copies."""
        self.rejected: Counter[str] = Counter()
        """Number refused, by reason."""
        self.error: str | None = None
        """What is wrong with the directory's present files."""
        self._apply = apply
        self._newer_than = newer_than
        self._log = log
        self._found = Found()

    def take(self, body: bytes, signature: bytes) -> None:
        """Apply a change that is signed, for this target, not expired, and newer than all before or the one in force.

        Raises ``Refused``.
        """
        try:
            change = self.authority.change(body, signature, time())
            if self.in_force is not None and replace(change, expires=self.in_force.expires) == self.in_force:
                return
            newest = max(self.newest, self._newer_than())
            if change.generation <= newest:
                why = f"generation {change.generation} is not newer than {newest}, the newest so far: sign a larger one"
                raise Refused("older", why)  # noqa: TRY301 - handled like all others
        except Refused as refused:
            self._report(refused)
            raise
        self.newest, self.in_force = change.generation, change
        if change.keys:
            self.authority.accept(change.keys)
        self._apply(change)

    def superseded(self) -> None:
        """Note that a new version of the configuration file is in force instead."""
        self.in_force = None

    def look(self) -> None:
        """Take the directory's present content if it has changed; errors in it are logged once."""
        if self.directory is None:
            return
        found = _read(self.directory)
        if found == self._found:
            return
        self._found = found
        self.error = None
        if found == Found():
            return  # not written yet, or removed: the change in force stays
        try:
            if found.body is None or found.signature is None:
                missing = found.error or f"{BODY if found.body is None else SIGNATURE} is not there"
                refused = Refused("content", f"{self.directory}: {missing}: both files are of one ConfigMap")
                self._report(refused)
                raise refused
            self.take(found.body, found.signature)
        except Refused as refused:
            if refused.reason != "older":  # a mounted ConfigMap is up to a minute behind pushes
                self.error = str(refused)

    def _report(self, refused: Refused) -> None:
        self.rejected[refused.reason] += 1
        count = self.rejected[refused.reason]
        if count.bit_count() == 1:  # the 1st, 2nd, 4th, 8th: anyone who reaches the port can send wrong ones
            self._log.warning(
                "a change is refused; the parameters in force stay",
                extra={"reason": refused.reason, "error": str(refused), "count": count},
            )


def _read(directory: Path) -> Found:
    """Read both files of one version: kubelet swaps the link ``..data``, and then removes the old directory."""
    while True:
        version = (directory / "..data").resolve()
        at = version if version.is_dir() else directory
        try:
            body, signature = (path.read_bytes() if path.exists() else None for path in (at / BODY, at / SIGNATURE))
            found = Found(body, signature)
        except OSError as error:
            found = Found(error=f"{Path(str(error.filename)).name}: {error.strerror}")
        if version == (directory / "..data").resolve():
            return found
