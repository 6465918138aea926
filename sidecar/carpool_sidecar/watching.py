"""The configuration file, watched: what is wrong with it changes nothing, what is right is told once."""

from __future__ import annotations

import asyncio
from hashlib import blake2b
from typing import TYPE_CHECKING

from carpool.policy import PolicyError
from carpool_sidecar.config import check_change, parse

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable
    from pathlib import Path

    from carpool_sidecar.config import SidecarConfig

INTERVAL = 1.0
"""Seconds between two looks. A ConfigMap changes by a swap of symbolic links, which file events often miss."""


class ConfigFile:
    """One file's versions. ``changed`` is called with each good one after the first."""

    def __init__(
        self, path: Path, current: SidecarConfig, changed: Callable[[SidecarConfig], None], log: logging.Logger
    ) -> None:
        self.error: str | None = None
        """What is wrong with the file as it is now."""
        self.rejected = 0
        """Bad versions seen so far."""
        self.generation = current.generation or 1
        self._path = path
        self._current = current
        self._changed = changed
        self._log = log
        self._content = _digest(path)

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL)
            self.look()

    def look(self) -> None:
        """Take the file as it is now, if it is another than before."""
        content = _digest(self._path)
        if content == self._content:
            return
        self._content = content
        try:
            config = parse(self._path.read_text("utf-8"))
            check_change(self._current, config)
        except (OSError, UnicodeDecodeError, PolicyError) as error:
            self.error = str(error)
            self.rejected += 1
            self._log.error(
                "the configuration file is wrong; the last good version stays",
                extra={"file": str(self._path), "error": self.error, "generation": self.generation},
            )
            return
        self.error = None
        self._current = config
        self.generation = config.generation or self.generation + 1
        self._log.info("a new configuration", extra={"file": str(self._path), "generation": self.generation})
        self._changed(config)


def _digest(path: Path) -> bytes | None:
    """Return what tells one content from another: reading some kilobytes is surer than trusting times."""
    try:
        return blake2b(path.read_bytes()).digest()
    except OSError:
        return None
