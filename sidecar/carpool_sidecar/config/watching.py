"""Watches the configuration file: a wrong version changes nothing, each right one is applied once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from carpool.policy.plain import PolicyError
from carpool_sidecar.config.hints import not_utf8
from carpool_sidecar.config.settings import check_change, parse

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable
    from pathlib import Path

    from carpool_sidecar.config.settings import SidecarConfig

INTERVAL = 1.0
"""Seconds between two looks. A ConfigMap changes by a swap of symbolic links, which file events often miss."""


async def watch(look: Callable[[], None]) -> None:
    """Call ``look`` every ``INTERVAL`` until cancelled."""
    while True:
        await asyncio.sleep(INTERVAL)
        look()


class ConfigFile:
    """One file's versions. ``changed`` is called with each good one after the first; without a path none comes."""

    def __init__(
        self, path: Path | None, current: SidecarConfig, changed: Callable[[SidecarConfig], None], log: logging.Logger
    ) -> None:
        self.path = path
        self.current = current
        """The last good version."""
        self.error: str | None = None
        """What is wrong with the file's present version."""
        self.rejected = 0
        """Bad versions seen so far."""
        self.generation = current.generation or 1
        self._changed = changed
        self._log = log
        # Not the file's present content: it may have changed while the model was loaded.
        self._content: bytes | str | None = None

    def look(self) -> None:
        """Take the file's present version if it has changed."""
        if self.path is None:
            return
        # Read once, so that the checked content is also the remembered one. File times would be less reliable.
        content = _read(self.path)
        if content == self._content:
            return
        first = self._content is None
        self._content = content
        try:
            if isinstance(content, str):
                raise PolicyError("config", content)  # noqa: TRY301 - wrong like any other version
            config = parse(content.decode())
            check_change(self.current, config)
        except (UnicodeDecodeError, PolicyError) as error:
            self.error = not_utf8(error) if isinstance(error, UnicodeDecodeError) else str(error)
            self.rejected += 1
            self._log.error(
                "the configuration file is invalid; the last valid version stays",
                extra={"file": str(self.path), "error": self.error, "generation": self.generation},
            )
            return
        self.error = None
        if first and config == self.current:
            return
        self.current = config
        self.generation = config.generation or self.generation + 1
        self._log.info("a new configuration", extra={"file": str(self.path), "generation": self.generation})
        self._changed(config)


def _read(path: Path) -> bytes | str:
    """Return the file's content, or why it can't be read, in words."""
    try:
        return path.read_bytes()
    except OSError as error:
        return str(error)
