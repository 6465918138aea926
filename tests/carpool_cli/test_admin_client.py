from __future__ import annotations

import click
import pytest

from carpool_cli.admin_client import AdminClient, AdminError, key_of
from carpool_cli.options import ADDRESS


def client(url: str) -> AdminClient:
    return AdminClient(ADDRESS.convert(url, None, None))


def test_a_running_sidecar_is_read_as_types(up):
    snapshot = client(up.admin).report()
    assert snapshot.slo_seconds == 0.05
    assert snapshot.queue.slots >= 1
    assert all(lane.parameters.max_batch >= 1 for lane in snapshot.lanes.values())
    assert client(up.admin).explanation().tuned is True


@pytest.mark.parametrize(("url", "says"), [("http://127.0.0.1:9", "no sidecar answers"), (None, "no sidecar's admin")])
def test_what_is_no_admin_port_says_so(url, says, echo):
    with pytest.raises(AdminError, match=says):
        client(url or echo).report()


def test_a_key_is_read_and_needed(launched, echo, tmp_path):
    path = tmp_path / "key"
    path.write_text("secret\n")
    assert key_of(path) == "secret"
    assert key_of(None) is None
    with pytest.raises(click.ClickException, match="nowhere"):
        key_of(tmp_path / "nowhere")
    with launched("--upstream", echo, "--slo-p99", "50ms", "--set", f"apiKeyFile={path}") as started:
        with pytest.raises(AdminError, match="--key-file"):
            client(started.admin).report()
        address = ADDRESS.convert(started.admin, None, None)
        assert AdminClient(address, "secret").report().generation == 1
