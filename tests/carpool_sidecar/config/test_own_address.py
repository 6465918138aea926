from __future__ import annotations

import pytest

from carpool.policy.plain import PolicyError
from carpool_sidecar.config.own_address import refuse
from carpool_sidecar.config.settings import Upstream


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
        ("LOCALHOST", "[::1]"),
        ("0.0.0.0", "127.0.0.1"),
        ("127.0.0.1", "localhost"),
        ("127.0.0.1", "0.0.0.0"),
        ("127.8.0.1", "0.0.0.0"),
        ("localhost", "0.0.0.0"),
        ("0.0.0.0", "0.0.0.0"),
        ("[::1]", "[::]"),
        ("[::]", "[::]"),
        ("[::ffff:127.0.0.1]", "*"),
        ("[::1]", "*"),
        ("Pod.example", "pod.example"),
    ],
)
def test_the_sidecars_own_ports_are_no_upstream(host, own):
    for listen, admin, field in ((f"{own}:80", "h:1", "listen"), ("h:1", f"{own}:80", "admin")):
        with pytest.raises(
            PolicyError, match=rf"own .* port \({field}: .*:80\): name the model server's port"
        ) as caught:
            refuse(Upstream(url=f"http://{host}"), listen, admin)
        assert caught.value.field == "upstream.url"


@pytest.mark.parametrize(
    ("url", "own"),
    [
        ("http://127.0.0.1:8001", "127.0.0.1:8000"),
        ("http://127.0.0.2:8000", "127.0.0.1:8000"),
        ("http://[::1]:8000", "127.0.0.1:8000"),
        ("http://[::1]:8000", "0.0.0.0:8000"),
        ("http://10.1.2.3:8000", "0.0.0.0:8000"),
        ("http://model:8000", "*:8000"),
        ("http://127.0.0.1:0", "127.0.0.1:0"),
        ("unix:/run/model.sock", "0.0.0.0:80"),
    ],
)
def test_another_server_is(url, own):
    refuse(Upstream(url=url), own, own)
    refuse(None, own, own)
