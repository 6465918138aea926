"""Profile files: a device's batch latency. Measured by `carpool profile`, or entered from a source."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from carpool.learning.latency_model import ServiceTime
from carpool_cli.answers import UNREADABLE, BadFile
from carpool_cli.printable import json_of

if TYPE_CHECKING:
    from pathlib import Path

Positive = Annotated[float, Meta(gt=0)]


class DeviceProfile(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True, rename="camel"):
    """Batch latency of one model on one device.

    ``rows``: batch sizes, ascending. ``seconds``: the mean service time of each. ``cv``: standard deviation of single
    batches over their mean. ``executors``: server concurrency, the number of batches that the device computes at once
    without slowing each other. ``source``: a reference for the figures; "synthetic" where nothing was measured.
    """

    name: str
    source: str
    executors: Annotated[int, Meta(ge=1, le=256)] = 1
    rows: Annotated[tuple[Annotated[int, Meta(ge=1)], ...], Meta(min_length=1)]
    seconds: tuple[Positive, ...]
    cv: Annotated[float, Meta(ge=0, le=10)] = 0.0
    largest_safe: int | None = None
    """Rows of the largest batch that memory allows, if known."""
    measured: dict[str, str | float] | None = None
    """How it was measured: machine, date, command. For users."""

    def service_time(self) -> ServiceTime:
        """Return the curve: straight lines between the sizes given."""
        curve = dict(zip(self.rows, self.seconds, strict=True))
        return ServiceTime.measured(curve, noise=self.cv, executors=self.executors)


def is_engine(path: Path) -> bool:
    """Whether a profile is that of an engine of token streams; a file that can't be read is not."""
    try:
        return "step" in msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, *UNREADABLE):
        return False


def load(path: Path, executors: int | None = None) -> DeviceProfile:
    """Read a profile file; ``executors``: the server concurrency, if another than the profile's.

    Raises ``BadFile`` naming the file, the field and its format.
    """
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=DeviceProfile)
    except OSError as error:
        raise BadFile(f"{path}: {error.strerror}") from None
    except UNREADABLE as error:
        if is_engine(path):
            raise BadFile(
                f"{path}: that is an engine's profile, for token streams; "
                "`carpool recommend --generative` and `carpool simulate --generative` take it"
            ) from None
        raise BadFile(
            f"{path}: {error}. A profile has name, source, executors, rows, seconds, cv; `carpool profile` writes one"
        ) from None
    if len(profile.rows) != len(profile.seconds):
        raise BadFile(
            f"{path}: {len(profile.rows)} rows but {len(profile.seconds)} seconds: give one time for each batch size"
        )
    if any(after <= before for before, after in pairwise(profile.rows)):
        raise BadFile(f"{path}: rows must ascend")
    return profile if executors is None else replace(profile, executors=executors)


def save(profile: DeviceProfile, path: Path) -> None:
    """Write a profile file."""
    path.write_bytes(json_of(profile) + b"\n")
