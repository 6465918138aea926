"""What the webhook wrote on a pod about its sidecar. Anyone who creates pods can write it, so it is not trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta, Struct

from carpool_operator.api.annotations import STATUS

if TYPE_CHECKING:
    from collections.abc import Mapping

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
