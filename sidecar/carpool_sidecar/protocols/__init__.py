"""The wire protocols as pure functions of bytes: which requests are inference, and the codec of each.

``route`` names the endpoint of a request target; ``CODECS[endpoint.protocol]`` parses, merges, splits and assembles.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import unquote

from carpool_sidecar.protocols import v1, v2
from carpool_sidecar.protocols.common import Endpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from carpool_sidecar.protocols.common import Codec

CODECS: Mapping[str, Codec] = {"v1": v1, "v2": v2}

_V1 = re.compile(rb"/v1/models/([^/:?#]+)(?:/(?:versions|labels)/([^/:?#]+))?:predict(?:\?.*)?")
_V2 = re.compile(rb"/v2/models/([^/?#]+)(?:/versions/([^/?#]+))?/infer(?:\?.*)?")


def route(target: bytes) -> Endpoint | None:
    """Return the endpoint of a ``POST`` target such as ``/v2/models/m/infer``; None: it is forwarded unchanged."""
    found = _V1.fullmatch(target) or _V2.fullmatch(target)
    if found is None:
        return None
    model, version = (unquote((part or b"").decode("latin-1")) for part in found.groups())
    return Endpoint("v1" if found.re is _V1 else "v2", model, version, target)
