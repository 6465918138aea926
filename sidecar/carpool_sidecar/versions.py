"""Which version of the configuration is in force: the file's, or a signed change from outside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from carpool_sidecar.admin.changes import Changes
from carpool_sidecar.admin.signatures import Authority
from carpool_sidecar.config.watching import ConfigFile

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

    from carpool.exchange.change import Change
    from carpool_sidecar.config.settings import SidecarConfig


class Versions:
    """The configuration in force, and where newer versions come from: the last that comes is in force.

    ``apply`` is called with each, and with its generation if it is a change from outside.
    """

    def __init__(
        self,
        config: SidecarConfig,
        path: Path | None,
        apply: Callable[[SidecarConfig, int | None], None],
        log: logging.Logger,
    ) -> None:
        """``path``: the file, to be watched. Raises ``PolicyError`` if the public key can't be used."""
        self.config = config
        self.file = ConfigFile(path, config, self._configured, log)
        self.changes: Changes | None = None
        """Takes changes from outside, if any are allowed."""
        if config.public_key is not None:
            self.changes = Changes(
                Authority(config.public_key, config.target),
                self._changed_from_outside,
                lambda: self.generation,
                log,
                None if config.changes is None else Path(config.changes),
            )
        self._apply = apply
        self._log = log

    @property
    def change(self) -> Change | None:
        """The change from outside that is in force instead of the file's parameters."""
        return None if self.changes is None else self.changes.in_force

    @property
    def generation(self) -> int:
        """The newest version that was accepted."""
        change = self.change
        return self.file.generation if change is None else max(self.file.generation, change.generation)

    def use(self, config: SidecarConfig, change: int | None = None) -> None:
        """Put a version in force; ``change``: its generation if it is a change from outside."""
        self.config = config
        self._apply(config, change)

    def _configured(self, config: SidecarConfig) -> None:
        """Use another version of the file, which replaces changes from outside."""
        if self.changes is not None:
            self.changes.superseded()
        self._log.setLevel(config.log.upper())
        self.use(config)

    def _changed_from_outside(self, change: Change) -> None:
        """Use a change; from now on nothing is tuned here."""
        self._log.info("parameters from outside", extra={"generation": change.generation})
        config = self.file.current
        policy = change.policy or config.policy
        self.use(replace(config, policy=policy, parameters=change.parameters), change.generation)
