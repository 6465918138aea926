from __future__ import annotations

import asyncio
import gzip
import json
import ssl
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from carpool.policy.plain import PolicyError, from_plain
from carpool_operator.api.model import Pod, Target
from carpool_operator.api.spec import Prometheus as Settings
from carpool_operator.tuning.sources import prometheus
from carpool_operator.tuning.sources.endpoint import endpoint, needed
from carpool_operator.tuning.sources.prometheus import Prometheus, open_session

ASKED = 6000.5
"""Prometheus's clock at every question."""


def pod(name, uid=None):
    return Pod(
        namespace="shop", name=name, uid=uid or f"uid-{name}", target=Target("shop", "Deployment", "resnet"),
        ip="10.244.0.9", admin_port=14090, ready=True, deleting=False, template_hash="h",
    )  # fmt: skip


class Asked(NamedTuple):
    path: str
    headers: dict[str, str]
    query: str


class Fake:
    """Holds scrapes by pod and time, and answers as Prometheus does; or with what `answer` returns."""

    def __init__(self, stored) -> None:
        self.stored = stored
        self.pods = {}
        self.asked: list[Asked] = []
        self.answer = None
        self.url = ""

    async def handle(self, request):
        form = await request.post()
        self.asked.append(Asked(request.path, dict(request.headers), form["query"]))
        if self.answer is not None:
            found = await self.answer(form["query"])
            if found is not None:
                return found
        return success(*self.result(form["query"]))

    def result(self, query):
        named = [name for name in self.pods if name in query.partition("pod=~")[2]]
        if query.startswith("time()"):
            return "vector", self.stored.vector(ASKED, {name: ASKED - max(self.pods[name]) for name in named})
        return "matrix", [series for name in named for series in self.stored.matrix(self.pods[name], pod=name)]

    @property
    def ranges(self):
        return [each.query for each in self.asked if not each.query.startswith("time()")]


def success(kind, result, **more):
    return web.json_response({"status": "success", "data": {"resultType": kind, "result": result}, **more})


@pytest.fixture
async def serve(stored):
    runners = []

    async def start(tls=None):
        fake = Fake(stored)
        app = web.Application(client_max_size=2**20)
        app.router.add_route("*", "/{path:.*}", fake.handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        fake.url = f"http{'s' if tls else ''}://127.0.0.1:{runner.addresses[0][1]}"
        return fake

    yield start
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
async def session():
    async with open_session() as opened:
        yield opened


@pytest.fixture
async def fake(serve):
    return await serve()


@pytest.fixture
def source(fake, session):
    return Prometheus(endpoint(Settings(url=fake.url), {}), session, stale_after=30.0)


async def error_of(source, *pods):
    """The one error that all pods have."""
    readings = await source.read("shop", [*pods] or [pod("a")], 100.0)
    assert all(reading.report is None for reading in readings.values())
    (text,) = {reading.error for reading in readings.values()}
    assert "\n" not in text
    return text


async def test_a_pod_is_read_with_the_time_of_its_scrape(fake, source, stored):
    fake.pods["a"] = {5980.5: stored.scrape(), 5995.5: stored.scrape({"m": stored.model_stats(arrivals=12)})}
    readings = await source.read("shop", [pod("a", "u-1")], 100.0)
    assert list(readings) == ["u-1"]
    assert readings["u-1"].at == 95.0  # 5 s old by Prometheus's clock, so by ours
    assert readings["u-1"].report.stats.at == 5995.5
    assert readings["u-1"].report.stats.models["m"].arrivals == 12
    assert [each.path for each in fake.asked] == ["/api/v1/query"] * 2
    assert "[30000ms]" in fake.ranges[0]


async def test_what_was_read_already_is_not_asked_for_again(fake, source, stored):
    fake.pods = {name: {5990.5: stored.scrape()} for name in "ab"}
    assert sorted(await source.read("shop", [pod("a"), pod("b")], 100.0)) == ["uid-a", "uid-b"]
    assert await source.read("shop", [pod("a"), pod("b")], 102.0) == {}
    assert len(fake.ranges) == 1
    fake.pods["b"][5999.5] = stored.scrape(generation=8)
    third = await source.read("shop", [pod("a"), pod("b")], 104.0)
    assert list(third) == ["uid-b"]
    assert third["uid-b"].report.generation == 8
    assert 'pod=~"b"' in fake.ranges[1]


async def test_a_pod_of_the_same_name_is_another(fake, source, stored):
    fake.pods["a-0"] = {5990.5: stored.scrape()}
    await source.read("shop", [pod("a-0", "old")], 100.0)
    assert list(await source.read("shop", [pod("a-0", "new")], 101.0)) == ["new"]
    assert len(fake.ranges) == 2


async def test_one_silent_pod_takes_nothing_from_the_others(fake, source, stored):
    fake.pods = {"a": {5990.5: stored.scrape()}, "late": {5970.0: stored.scrape()}}
    fake.pods["half"] = {5990.5: {key: 1 for key in stored.scrape() if key[0] != "carpool_rows_total"}}
    readings = await source.read("shop", [pod(name) for name in ("a", "late", "gone", "half")], 100.0)
    assert readings["uid-a"].report is not None
    assert 'has no carpool_config_generation{namespace="shop",pod=~"gone"}' in readings["uid-gone"].error
    assert "scraped pod late last at 01:39:30 UTC, longer ago than spec.metrics.staleAfter (30s)" in (
        readings["uid-late"].error
    )
    assert "carpool_rows_total" in readings["uid-half"].error
    assert "late" not in fake.ranges[0]
    assert all(readings[f"uid-{name}"].at == 100.0 for name in ("gone", "late", "half"))


async def test_errors_stay_the_same_while_their_cause_does(fake, source, stored):
    """A status that changes with every look would be written with every look."""
    fake.pods = {"late": {5960.0: stored.scrape()}}
    first = await error_of(source, pod("late"))
    fake.result = lambda query: ("vector", stored.vector(ASKED + 9, {"late": 49.5}))
    assert await error_of(source, pod("late")) == first


async def test_nothing_behind_the_labels(fake, source):
    assert "among its targets" in await error_of(source)
    fake.pods["a"] = {5990.5: {}}
    assert "nothing else" in await error_of(source)


async def test_more_pods_than_one_answer_holds_are_asked_for_by_the_half(fake, source, stored, monkeypatch):
    fake.pods = {f"p{number:02}": {5990.5: stored.scrape()} for number in range(20)}
    pods = [pod(name) for name in fake.pods]
    size = len(json.dumps(stored.matrix(fake.pods["p00"])))
    monkeypatch.setattr(prometheus, "LARGEST", 3 * size)
    readings = await source.read("shop", pods, 100.0)
    assert len(readings) == 20
    assert all(reading.report is not None for reading in readings.values())
    sizes = [query.count("p") for query in (each.partition('pod=~"')[2].partition('"')[0] for each in fake.ranges)]
    assert max(sizes[4:]) <= 2
    fake.pods["p00"][5999.5] = stored.scrape({f"m{number}": stored.model_stats() for number in range(9)})
    readings = await source.read("shop", pods, 101.0)
    assert list(readings) == ["uid-p00"]
    assert "MiB for one pod" in readings["uid-p00"].error


@pytest.mark.parametrize(
    ("status", "said", "told"),
    [
        (401, {}, "refuses the operator's credentials (401): check the Secret"),
        (403, {"error": "no rights"}, "(403: no rights)"),
        (404, {}, "has no Prometheus API (404)"),
        (405, {}, "without /api/v1"),
        (
            422,
            {"errorType": "execution", "error": "too many samples"},
            "(422: execution: too many samples): raise its limits",
        ),
        (400, {"errorType": "bad_data", "error": "parse\nerror"}, "parse error"),
        (503, {}, "is starting, overloaded or behind a proxy"),
        (429, {}, "overloaded"),
        (500, {"error": "x" * 10_000}, "answers 500: xxx"),
    ],
)
async def test_refusals_say_what_to_do(fake, source, status, said, told):
    async def answer(_):
        return web.json_response({"status": "error", **said}, status=status)

    fake.answer = answer
    text = await error_of(source)
    assert told in text
    assert fake.url in text
    assert len(text) < 700


async def test_a_page_is_not_passed_on(fake, source):
    """What any server says to the operator is no business of everybody who may read a status."""

    async def answer(_):
        return web.Response(status=500, text="<html>the secret of this network</html>", content_type="text/html")

    fake.answer = answer
    assert "secret" not in await error_of(source)


@pytest.mark.parametrize(
    ("response", "told"),
    [
        (lambda: web.Response(text="<html>log in", content_type="text/html"), "answers text/html instead of JSON"),
        (lambda: web.Response(body=b"{", content_type="application/json"), "does not answer as Prometheus would"),
        (lambda: web.Response(body=b"[" * 100_000, content_type="application/json"), "does not answer as Prometheus"),
        (lambda: web.json_response({"status": "success"}), "failed"),
        (lambda: web.json_response({"status": "error", "errorType": "timeout", "error": "no"}), "failed: timeout: no"),
        (lambda: success("scalar", []), "vector was asked for, not 'scalar'"),
        (lambda: success("vector", [{"metric": {}, "value": ["1", 2]}]), "does not answer as Prometheus would"),
        (
            lambda: web.Response(
                body=gzip.compress(b" " * 10**8), headers={"Content-Encoding": "gzip"}, content_type="application/json"
            ),
            "answers in gzip, which it was asked not to",
        ),
        (
            lambda: web.Response(status=302, headers={"Location": "https://me:secret@sso.example/login"}),
            "redirects to https://sso.example/login: set spec.metrics.prometheus.url to that",
        ),
    ],
)  # fmt: skip
async def test_a_source_that_is_not_prometheus_is_reported_as_such(fake, source, response, told):
    async def answer(_):
        return response()

    fake.answer = answer
    text = await error_of(source)
    assert told in text
    assert "secret" not in text
    assert len(fake.asked) == 1  # a redirect least of all is followed


async def test_a_failure_halfway_is_reported_for_all_pods_that_were_not_read(fake, source, stored):
    fake.pods = {f"p{number:02}": {5990.5: stored.scrape()} for number in range(40)}

    async def answer(query):
        return web.Response(status=503) if 'pod=~"p16|' in query else None

    fake.answer = answer
    readings = await source.read("shop", [pod(name) for name in fake.pods], 100.0)
    assert sum(reading.report is not None for reading in readings.values()) == 16
    assert sum("overloaded" in reading.error for reading in readings.values()) == 24


async def test_a_slow_answer_is_not_waited_for(fake, session):
    held = asyncio.Event()

    async def answer(_):
        await held.wait()

    fake.answer = answer
    source = Prometheus(endpoint(Settings(url=fake.url), {}), session, stale_after=30.0, timeout=0.05)
    text = await error_of(source)
    held.set()
    assert "did not answer within 50ms" in text


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:9", "Connection refused"),
        ("http://127.0.0.1:99999", "that is no address"),
        ("http://[::1", "that is no address"),
        ("http://a..b:80", "that is no address"),
    ],
)
async def test_nobody_there(session, url, why):
    source = Prometheus(endpoint(Settings(url=url), {}), session, stale_after=30.0)
    text = await error_of(source)
    assert text.startswith(f"no Prometheus answers at {url}")
    assert why in text
    assert text.endswith("check spec.metrics.prometheus.url")


# Credentials, and the server's certificate


def settings(**fields):
    return from_plain({"url": "https://prometheus.example/base/", **fields}, Settings, what="")


BEARER = {"bearer": {"name": "s", "key": "token"}}
BASIC = {"basic": {"username": {"name": "s", "key": "user"}, "password": {"name": "s", "key": "pass"}}}


@pytest.mark.parametrize(
    ("auth", "values", "header"),
    [
        (BEARER, {"token": b"abc\n"}, "Bearer abc"),
        (BASIC, {"user": b"me", "pass": b"p:w"}, "Basic bWU6cDp3"),
    ],
)
async def test_it_says_who_it_is(fake, session, auth, values, header):
    chosen = settings(url=fake.url, auth=auth)
    values = {("Secret", "s", key): value for key, value in values.items()}
    assert set(needed(chosen)) == set(values)
    source = Prometheus(endpoint(chosen, values), session, stale_after=30.0)
    await error_of(source)
    assert fake.asked[0].headers["Authorization"] == header


@pytest.mark.parametrize(
    ("auth", "values", "path", "told"),
    [
        (BEARER, {}, "auth.bearer", "has no Secret s with the key token"),
        (BEARER, {"token": b" \n"}, "auth.bearer", "is empty"),
        (BEARER, {"token": b"s3cret\r\nX: y"}, "auth.bearer", "no header may have"),
        (BEARER, {"token": "s3cret\u00e9".encode()}, "auth.bearer", "no header may have"),
        (BASIC, {"user": b"me"}, "auth.basic.password", "has no Secret s with the key pass"),
        (BASIC, {"user": b"s3cret:x", "pass": b"y"}, "auth.basic.username", "colon"),
    ],
)
def test_wrong_secrets_are_named_and_not_shown(auth, values, path, told):
    values = {("Secret", "s", key): value for key, value in values.items()}
    with pytest.raises(PolicyError, match=told) as caught:
        endpoint(settings(auth=auth), values)
    assert caught.value.field == f"spec.metrics.prometheus.{path}"
    assert "s3cret" not in str(caught.value)


def test_a_password_in_the_url_is_not_shown():
    where = endpoint(settings(url="http://me:secret@p.example:9090/base/"), {})
    assert where.url == "http://me:secret@p.example:9090/base/api/v1/query"
    assert where.base == "http://p.example:9090/base"


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """A certificate for 127.0.0.1 and prometheus.monitoring, its own authority; its PEM and a server's context."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("prometheus.monitoring")]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    path.write_bytes(
        pem
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(path)
    return pem, context


CA = {"secret": {"name": "ca", "key": "ca.crt"}}
CA_MAP = {"configMap": {"name": "ca", "key": "ca.crt"}}


@pytest.mark.parametrize(
    ("tls", "told"),
    [
        (None, "certificate of https://127.0.0.1"),
        ({"ca": CA}, "certificate of https://127.0.0.1"),  # its authority, but another name
        ({"ca": CA, "serverName": "prometheus.monitoring"}, ""),
        ({"ca": CA_MAP, "serverName": "prometheus.monitoring"}, ""),
        ({"insecureSkipVerify": True}, ""),
    ],
)
async def test_its_certificate_is_checked(serve, session, stored, authority, tls, told):
    pem, context = authority
    fake = await serve(context)
    fake.pods["a"] = {5990.5: stored.scrape()}
    chosen = settings(url=fake.url, **({} if tls is None else {"tls": tls}))
    source = Prometheus(endpoint(chosen, dict.fromkeys(needed(chosen), pem)), session, stale_after=30.0)
    (reading,) = (await source.read("shop", [pod("a")], 100.0)).values()
    assert (reading.report is None) == bool(told)
    assert told in reading.error
    if told:
        assert "set spec.metrics.prometheus.tls" in reading.error
        assert not fake.asked  # a server that is not trusted gets no credentials


@pytest.mark.parametrize(
    "pem", [b"", b"no certificate", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----", b"\xff"]
)
def test_what_is_no_authority_is_named(pem):
    with pytest.raises(PolicyError, match="no certificates in PEM") as caught:
        endpoint(settings(tls={"ca": CA}), {("Secret", "ca", "ca.crt"): pem})
    assert caught.value.field == "spec.metrics.prometheus.tls.ca"
