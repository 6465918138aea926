from __future__ import annotations

import pytest

from carpool_operator.injector.meshes import annotated
from carpool_operator.injector.ports import port_number


@pytest.mark.parametrize(
    ("text", "number"),
    [("8080", 8080), ("08080", 8080), ("0", 0), ("0" * 5000 + "1", 1), ("99999", 99999)]
    + [(text, None) for text in ("", "100000", "8" * 5000, "²", "٣", "-1", "+1", " 1", "1\n", "http", "1e3")],
)
def test_a_port_is_read_or_is_none(text, number):
    assert port_number(text) == number


@pytest.mark.parametrize("listed", ["9" * 5000, "²", "1-²", "9100," + "9" * 5000 + "-1"])
def test_ports_that_a_mesh_could_not_read_either_are_handed_on_as_they_are(listed):
    name = "traffic.sidecar.istio.io/excludeInboundPorts"
    assert annotated({name: listed}, {}, 9000, 14080, 14090)[name] == f"{listed},14090"
