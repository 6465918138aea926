from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import click
import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from carpool_cli.live.admin_client import AdminClient, AdminError, client_of, key_of
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
    path.write_text("s\xe9cret \u20ac\n", "utf-8")
    assert key_of(path) == "s\xe9cret \u20ac"
    assert key_of(None) is None
    with pytest.raises(click.ClickException, match="nowhere"):
        key_of(tmp_path / "nowhere")
    with launched("--upstream", echo, "--slo-p99", "50ms", "--set", f"apiKeyFile={path}") as started:
        with pytest.raises(AdminError, match="--key-file"):
            client(started.admin).report()
        address = ADDRESS.convert(started.admin, None, None)
        assert client_of(address, path, None).report().generation == 1


@pytest.mark.parametrize(("content", "says"), [(b" \n\n", "it is empty"), (b"one\r\ntwo", "give --workload, too")])
def test_a_key_that_is_not_one_line_is_refused(content, says, carpool, tmp_path):
    path = tmp_path / "key"
    path.write_bytes(content)
    for command in ("explain", "top", "savings", ("simulate", "--from-running")):
        words = (command,) if isinstance(command, str) else command
        result = carpool(*words, "http://127.0.0.1:9", "--key-file", path)
        assert result.exit_code == 1, result.output
        assert result.output.startswith(f"Error: no admin key in {path}: it is ")
        assert says in result.output


@contextmanager
def answering(status, document):
    """An admin port that answers everything with the same."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_page_of_an_admin_port_is_not_the_port():
    missing = {"error": "the admin port serves /livez, /metrics"}
    with answering(404, missing) as url, pytest.raises(AdminError, match=r"/metrics is a page .* leave the path out"):
        client(f"{url}/metrics").report(arrivals=True)


@pytest.mark.parametrize(
    ("status", "document", "says"),
    [
        (404, {"error": "the admin port serves /livez, /metrics"}, "is an older sidecar's, without /v1/stats: update"),
        (
            403,
            {"error": "served on loopback only, or send a ticket signed by x"},
            "--workload NAMESPACE/Deployment/NAME",
        ),
        (403, {"error": "served on loopback addresses only"}, "refuses: served on loopback addresses only"),
        (403, ["no words"], "refuses: "),
        (200, {"stats": 1}, "does not answer like this version: stats"),
    ],
)
def test_what_an_admin_port_refuses_names_the_fix(status, document, says):
    with answering(status, document) as url, pytest.raises(AdminError, match=says):
        client(url).report(arrivals=True)


def test_a_reason_of_another_version_is_read():
    decision = {"parameters": {}, "change": False, "reason": "OfAnotherVersion", "message": "because"}
    said = {"tuned": True, "decisions": [{"model": "m", "at": 1.0, "decision": decision}]}
    with answering(200, said) as url:
        (found,) = client(url).explanation().decisions
    assert found.decision.reason == "OfAnotherVersion"


@pytest.mark.parametrize("at", [1e20, -1e20])
def test_a_decision_of_no_date_is_no_sidecars(at):
    decision = {"parameters": {}, "change": False, "reason": "x", "message": "because"}
    said = {"tuned": True, "decisions": [{"model": "m", "at": at, "decision": decision}]}
    with answering(200, said) as url, pytest.raises(AdminError, match=r"like this version: decisions.*\.at: Expected"):
        client(url).explanation()


@pytest.mark.parametrize("seconds", [[], [0.0], [0.0, 0.0], [0.0, 0.1, -0.1]])
def test_latencies_that_are_none_are_no_sidecars(up, seconds):
    said = msgspec.to_builtins(client(up.admin).report(), enc_hook=str)
    said["lanes"] = {"m": {"parameters": {}, "passThrough": False, "queuedRequests": 0, "cap": 1, "quarantined": False}}
    with answering(200, said) as url:
        assert client(url).report().lanes["m"].service_seconds is None
    said["lanes"]["m"]["serviceSeconds"] = seconds
    with (
        answering(200, said) as url,
        pytest.raises(AdminError, match=r"lanes\.m\.serviceSeconds: the latency of a batch"),
    ):
        client(url).report()


def test_a_policy_that_is_none_is_no_sidecars():
    with (
        answering(200, {"config": {}}) as url,
        pytest.raises(AdminError, match="not answer like a sidecar's admin port"),
    ):
        client(url).policy()
    newer = {"config": {"policy": {"slo": {"latency": {"p99": "50ms"}}, "colour": "red"}}}
    with answering(200, newer) as url, pytest.raises(AdminError, match=r"like this version: .*colour"):
        client(url).policy()


def test_the_policy_and_the_last_arrivals_of_a_running_sidecar_are_read(up):
    assert client(up.admin).policy().slo.due == 0.05
    assert all(lane.arrivals == [] for lane in client(up.admin).report().lanes.values())


def test_a_ticket_of_the_operators_key_opens_an_injected_sidecar(launched, echo, tmp_path):
    private, key = Ed25519PrivateKey.generate(), tmp_path / "privateKey.pem"
    key.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public = private.public_key().public_bytes_raw().hex()
    settings = ("--set", f"publicKey={public}", "--set", "target=shop/Deployment/resnet")
    with launched("--upstream", echo, "--slo-p99", "50ms", *settings) as started:
        address = ADDRESS.convert(started.admin, None, None)
        assert client_of(address, key, "shop/Deployment/resnet").report().ready
        with pytest.raises(AdminError, match=r"does not take this key \(this is for target 'shop/Deployment/bert'"):
            client_of(address, key, "shop/Deployment/bert").report()


@pytest.mark.parametrize(
    ("workload", "content", "says"),
    [
        ("resnet", "x", "write e.g. shop/Deployment/resnet"),
        ("shop/Deployment/", "x", "write e.g. shop/Deployment/resnet"),
        ("shop/Deployment/resnet", "no key", "holds no PEM key"),
        ("shop/Deployment/resnet", None, "--workload needs --key-file"),
    ],
)
def test_what_signs_no_ticket_is_named(workload, content, says, tmp_path):
    path = tmp_path / "key"
    if content is not None:
        path.write_text(content)
    with pytest.raises(click.ClickException, match=says):
        client_of(ADDRESS.convert(":9", None, None), None if content is None else path, workload)


@pytest.mark.parametrize(
    ("document", "url"),
    [
        ({"data": "127.0.0.1:8263"}, "http://127.0.0.1:8263"),
        ({"data": "0.0.0.0:8263"}, "http://127.0.0.1:8263"),
        ({}, "http://127.0.0.1:8080"),
    ],
)
def test_the_data_port_is_the_sidecars_own(document, url):
    with answering(200, document) as admin:
        assert client(admin).data_address() == url


def test_a_running_sidecar_names_its_data_port(up):
    assert client(up.admin).data_address() == up.data
