from __future__ import annotations

import pytest

from carpool_sidecar import protocols
from carpool_sidecar.protocols.common import Endpoint


@pytest.mark.parametrize(
    ("target", "protocol", "model", "version"),
    [
        (b"/v1/models/m:predict", "v1", "m", ""),
        (b"/v1/models/m/versions/3:predict", "v1", "m", "3"),
        (b"/v1/models/m/labels/stable:predict", "v1", "m", "stable"),
        (b"/v1/models/a%20b:predict?x=1", "v1", "a b", ""),
        (b"/v2/models/m/infer", "v2", "m", ""),
        (b"/v2/models/m/versions/3/infer", "v2", "m", "3"),
        (b"/v2/models/%C3%A9/infer?debug=1", "v2", "\u00e9", ""),
    ],
)
def test_inference_targets(target, protocol, model, version):
    assert protocols.route(target) == Endpoint(protocol, model, version, target)
    assert protocols.CODECS[protocol]


@pytest.mark.parametrize(
    "target",
    [
        b"/v1/models/m",
        b"/v1/models/m:explain",
        b"/v1/models/m/versions/3/metadata",
        b"/v1/models/a/b:predict",
        b"/v2",
        b"/v2/models/m",
        b"/v2/models/m/ready",
        b"/v2/models/m/generate",
        b"/v2/models//infer",
        b"/v2/models/m/infer/",
        b"/v2/models/m/infer#x",
        b"/x/v2/models/m/infer",
        b"*",
        b"",
        b"\xff",
    ],
)
def test_everything_else_is_forwarded(target):
    assert protocols.route(target) is None
