"""Tenants, tokens and certificates: what a server that asks for them is shown, and nobody else."""

from __future__ import annotations

import ssl
from base64 import b64encode
from datetime import UTC, datetime, timedelta

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from carpool.policy.plain import PolicyError, from_plain
from carpool_operator.api.model import Pod, Target
from carpool_operator.api.spec import Prometheus as Settings
from carpool_operator.tuning.sources.choice import _labels
from carpool_operator.tuning.sources.endpoint import endpoint, needed
from carpool_operator.tuning.sources.prometheus import Prometheus, open_session

POD = Pod(
    namespace="shop", name="resnet-0", uid="u1", target=Target("shop", "StatefulSet", "resnet"), ip="10.244.0.9",
    admin_port=14090, ready=True, deleting=False, template_hash="h",
)  # fmt: skip
ASKED = 6000.5


@pytest.fixture
async def session():
    async with open_session() as opened:
        yield opened


@pytest.fixture
async def serve():
    runners = []

    async def start(handle, tls=None):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        return f"http{'s' if tls else ''}://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


class Server:
    """A Prometheus that answers those who show what ``admits`` wants."""

    def __init__(self, stored, admits=lambda request: True):
        self.stored, self.admits, self.asked = stored, admits, []

    async def handle(self, request):
        form = await request.post()
        self.asked.append((dict(request.headers), form["query"]))
        if not self.admits(request):
            return web.json_response({"status": "error"}, status=401)
        scrapes = {5990.5: self.stored.scrape()}
        if form["query"].startswith("time()"):
            kind, result = "vector", self.stored.vector(ASKED, {POD.name: 10.0})
        else:
            kind, result = "matrix", self.stored.matrix(scrapes, pod=POD.name)
        return web.json_response({"status": "success", "data": {"resultType": kind, "result": result}})


def settings(url, **fields):
    return from_plain({"url": url, **fields}, Settings, what="")


def reader(session, chosen, **values):
    found = {key: values[key[2]] for key in needed(chosen)}
    return Prometheus(endpoint(chosen, found), session, stale_after=60.0, labels=_labels(chosen))


async def read(client, now=100.0):
    client._read.clear()  # so that it is read each time
    return (await client.read(POD.namespace, [POD], now))[POD.uid]


async def test_a_tenant_is_named_and_labels_are_as_they_are_called_there(serve, session, stored):
    server = Server(stored)
    chosen = settings(
        await serve(server.handle),
        headers=[
            {"name": "X-Scope-OrgID", "value": "shop"},
            {"name": "X-Token", "secret": {"name": "s", "key": "token"}},
        ],
        matchers=[{"label": "cluster", "value": "eu-1"}],
        labels={"namespace": "kubernetes_namespace"},
    )
    reading = await read(reader(session, chosen, token=b"secret\n"))
    assert reading.report is not None
    for headers, query in server.asked:
        assert (headers["X-Scope-OrgID"], headers["X-Token"]) == ("shop", "secret")
        assert '{kubernetes_namespace="shop",pod=~"resnet-0",cluster="eu-1"}' in query or (
            ',kubernetes_namespace="shop",pod=~"resnet-0",cluster="eu-1"}' in query
        )
    assert len(server.asked) == 2


# Tokens


class Tokens:
    """Gives tokens t1, t2 and so on."""

    def __init__(self, **answer):
        self.asked, self.answer = [], answer

    async def handle(self, request):
        form = await request.post()
        self.asked.append((request.headers["Authorization"], dict(form)))
        return web.json_response({"access_token": f"t{len(self.asked)}", "token_type": "bearer", **self.answer})


SECRETS = {"id": b"carpool:a", "secret": b"p w\n"}
BASIC = "Basic " + b64encode(b"carpool%3Aa:p+w").decode()
REF = {"clientId": {"name": "s", "key": "id"}, "clientSecret": {"name": "s", "key": "secret"}}


def oauth2(url, **fields):
    return {"oauth2": {"tokenUrl": f"{url}/token", **REF, **fields}}


async def test_a_token_is_fetched_kept_and_fetched_again_before_its_end(serve, session, stored):
    tokens, server = Tokens(expires_in=3600), Server(stored)
    auth = oauth2(await serve(tokens.handle), scopes=["read", "metrics"], audience="https://prometheus")
    client = reader(session, settings(await serve(server.handle), auth=auth), **SECRETS)
    for now in (0.0, 1800.0, 3569.0, 3571.0):
        assert (await read(client, now)).report is not None
    form = {"grant_type": "client_credentials", "scope": "read metrics", "audience": "https://prometheus"}
    assert tokens.asked == [(BASIC, form)] * 2
    shown = [headers["Authorization"] for headers, _ in server.asked]
    assert shown == ["Bearer t1"] * 6 + ["Bearer t2"] * 2


async def test_a_token_that_is_refused_is_replaced(serve, session, stored):
    tokens = Tokens()
    server = Server(stored, lambda request: request.headers["Authorization"] == "Bearer t2")
    auth = oauth2(await serve(tokens.handle))
    client = reader(session, settings(await serve(server.handle), auth=auth), **SECRETS)
    refused = await read(client)
    assert "refuses the operator's credentials (401" in refused.error
    assert (await read(client)).report is not None


@pytest.mark.parametrize(
    ("response", "told"),
    [
        (lambda: web.json_response({"error": "invalid_client s3cret"}, status=401), "gave no token (401)"),
        (lambda: web.Response(status=302, headers={"Location": "http://elsewhere"}), "gave no token (302)"),
        (lambda: web.Response(text="<html>log in"), "answers with no token"),
        (lambda: web.json_response({"access_token": "a\nb"}), "no bearer token"),
        (lambda: web.json_response({"access_token": "a", "token_type": "mac"}), "no bearer token"),
        (lambda: web.Response(body=b" " * 100_000), "more than 64 KiB"),
    ],
)
async def test_no_token_is_an_error_that_shows_no_secret(serve, session, stored, response, told):
    async def handle(_):
        return response()

    server = Server(stored)
    auth = oauth2(await serve(handle))
    reading = await read(reader(session, settings(await serve(server.handle), auth=auth), **SECRETS))
    assert told in reading.error
    assert "s3cret" not in reading.error
    assert not server.asked


async def test_nobody_gives_tokens(session):
    client = reader(session, settings("http://127.0.0.1:9", auth=oauth2("http://127.0.0.1:9")), **SECRETS)
    assert "http://127.0.0.1:9/token gave no token" in (await read(client)).error


# Certificates


def certificate(name, issuer=None):
    """A certificate and its key in PEM, by an issuer or its own."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    of, by = issuer or (subject, key)
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(of)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key()), critical=False)
        .sign(by, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return made.public_bytes(serialization.Encoding.PEM), private, (subject, key)


@pytest.fixture(scope="module")
def authority():
    return certificate("authority")


@pytest.fixture(scope="module")
def mutual(authority, tmp_path_factory):
    """The context of a server that wants a certificate of the authority, and has one."""
    pem, _, issuer = authority
    folder = tmp_path_factory.mktemp("tls")
    served, private, _ = certificate("prometheus.monitoring", issuer)
    (folder / "server.pem").write_bytes(served + private)
    (folder / "ca.pem").write_bytes(pem)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(folder / "ca.pem"))
    context.load_cert_chain(folder / "server.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    return context


TLS = {"ca": {"secret": {"name": "s", "key": "ca"}}, "serverName": "prometheus.monitoring"}
CLIENT = {"certificate": {"name": "s", "key": "crt"}, "key": {"name": "s", "key": "private"}}


async def test_a_certificate_is_shown_to_a_server_that_wants_one(serve, session, stored, authority, mutual):
    pem, _, issuer = authority
    shown, private, _ = certificate("carpool", issuer)
    others, other_private, _ = certificate("somebody")
    server = Server(stored)
    url = await serve(server.handle, mutual)
    values = {"ca": pem, "crt": shown, "private": private}
    client = reader(session, settings(url, tls={**TLS, "client": CLIENT}), **values)
    assert (await read(client)).report is not None
    without = reader(session, settings(url, tls=TLS), **values)
    assert (await read(without)).report is None
    foreign = reader(session, settings(url, tls={**TLS, "client": CLIENT}), ca=pem, crt=others, private=other_private)
    assert (await read(foreign)).report is None
    assert len(server.asked) == 2


@pytest.mark.parametrize(("crt", "private"), [(b"", b""), (b"text", b"text"), ("own", "other"), ("own", b"")])
def test_a_certificate_without_its_key_is_named_and_not_shown(crt, private):
    first, second = certificate("carpool"), certificate("carpool")
    values = {
        "ca": first[0],
        "crt": first[0] if crt == "own" else crt,
        "private": second[1] if private == "other" else private,
    }
    chosen = settings("https://p", tls={**TLS, "client": CLIENT})
    with pytest.raises(PolicyError, match="no certificate with its key") as caught:
        endpoint(chosen, {key: values[key[2]] for key in needed(chosen)})
    assert caught.value.field == "spec.metrics.prometheus.tls.client"
    assert "PRIVATE" not in str(caught.value)
