"""What the webhook writes about a sidecar: its state before a policy arrives, and a pod's annotation.

Anyone who creates pods can write the annotation, so it is not trusted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta, Struct

from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool_operator.api.annotations import STATUS

if TYPE_CHECKING:
    from collections.abc import Mapping

STANDBY = Parameters(pass_through=True, max_in_flight=1024)
"""Parameters of a sidecar without a policy: everything passes through."""

STANDBY_SLO = Duration(3600.0)
"""Its SLO, the p99, in seconds: as long as a model may take without a sidecar."""

_Port = Annotated[int, Meta(ge=1, le=65535)]


class Injection(Struct, frozen=True, rename="camel"):
    """The model that the sidecar serves, and the sidecar's ports; ``None`` where unknown."""

    version: str = ""
    container: str = ""
    port: _Port | None = None
    data_port: _Port | None = None
    admin_port: _Port | None = None
    capture: bool = False
    """Whether calls to ``port`` from outside the pod reach the sidecar."""


_decoder = msgspec.json.Decoder(Injection)
_UNREADABLE = Injection()


def injection_of(annotations: Mapping[str, str]) -> Injection:
    """Read a pod's annotation; an unreadable one yields an empty ``Injection``."""
    try:
        return _decoder.decode(annotations.get(STATUS, ""))
    except (msgspec.DecodeError, RecursionError):
        return _UNREADABLE
