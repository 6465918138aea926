"""The counters of a policy's pods from a Prometheus server, over its HTTP API. It reads; it decides nothing.

Two questions, each consistent in itself. When was each pod scraped last: one small number a pod, and its age by
Prometheus's own clock, so that no clock here is compared with one there. Then, of pods scraped since they were last
read: all that was stored of them within ``stale_after`` (``scrapes`` says why raw samples). Nothing older is ever read.

Errors end in statuses, which are written when they differ: so they name no ages, and nothing of a page that may hold
anything.
"""

from __future__ import annotations

import os
import ssl
from base64 import b64encode
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import aiohttp
import msgspec
from msgspec import Struct, field

from carpool.policy.durations import format_seconds
from carpool.policy.plain import PolicyError
from carpool_operator.api.model import Reading
from carpool_operator.tuning.sources.scrapes import (
    GENERATION,
    POD_MONITOR,
    LabelNames,
    Series,
    UnusableError,
    ages,
    everything,
    freshness,
    reports,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from carpool_operator.api.model import Pod
    from carpool_operator.api.spec import KeyRef
    from carpool_operator.api.spec import Prometheus as Settings
    from carpool_operator.tuning.sources.scrapes import Fresh

TIMEOUT = 10.0
"""Seconds for one question, from connecting to the answer's last byte; the server is told to give up a second before.
"""

LARGEST = 16 * 2**20
"""Bytes of an answer, unpacked. A busy sidecar is 2,000 kinds of batches, 6,000 series of 300 bytes: 2 MiB."""

PODS = 16
"""Pods of one question to begin with; halved whenever an answer is too large."""

TOLD = 300
"""Characters of what the server itself says of an error."""

Key: TypeAlias = tuple[Literal["Secret", "ConfigMap"], str, str]
"""A key of an object in the policy's namespace: kind, name, key."""


class Endpoint(NamedTuple):
    """Where to ask, and as whom."""

    url: str
    """Of the API's query, whole."""
    base: str
    """As it may be shown to people."""
    headers: dict[str, str]
    tls: ssl.SSLContext | bool
    server_name: str | None


def needed(settings: Settings) -> list[Key]:
    """Return the keys whose values ``endpoint`` wants."""
    return [key for _, key in _references(settings)]


def _references(settings: Settings) -> Iterator[tuple[str, Key]]:
    def secret(ref: KeyRef) -> Key:
        return "Secret", ref.name, ref.key

    auth, tls = settings.auth, settings.tls
    if auth is not None and auth.bearer is not None:
        yield "auth.bearer", secret(auth.bearer)
    if auth is not None and auth.basic is not None:
        yield "auth.basic.username", secret(auth.basic.username)
        yield "auth.basic.password", secret(auth.basic.password)
    if tls is not None and tls.ca is not None and tls.ca.secret is not None:
        yield "tls.ca.secret", secret(tls.ca.secret)
    if tls is not None and tls.ca is not None and tls.ca.config_map is not None:
        yield "tls.ca.configMap", ("ConfigMap", tls.ca.config_map.name, tls.ca.config_map.key)


def endpoint(settings: Settings, values: Mapping[Key, bytes]) -> Endpoint:
    """Put together where to ask and as whom.

    ``values`` are those of the keys that ``needed`` names. Raises ``PolicyError`` naming the field whose Secret or
    ConfigMap has no such key, or nothing of use under it; never what is under it.
    """
    found: dict[str, bytes] = {}
    for path, key in _references(settings):
        if key not in values:
            kind, name, entry = key
            raise PolicyError(
                f"spec.metrics.prometheus.{path}",
                f"the policy's namespace has no {kind} {name} with the key {entry}, or the operator may not read it: "
                "docs/prometheus.md has the Role that lets it",
            )
        found[path] = values[key].strip()
    headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
    if (token := found.get("auth.bearer")) is not None:
        headers["Authorization"] = f"Bearer {_printable('auth.bearer', token)}"
    elif (user := found.get("auth.basic.username")) is not None:
        if b":" in user:
            raise PolicyError("spec.metrics.prometheus.auth.basic.username", "a name with a colon can't be sent")
        pair = user + b":" + found["auth.basic.password"]
        headers["Authorization"] = f"Basic {b64encode(pair).decode()}"
    base = settings.url.rstrip("/")
    tls = settings.tls
    context: ssl.SSLContext | bool = True
    if tls is not None and tls.insecure_skip_verify:
        context = False
    elif (authorities := found.get("tls.ca.secret", found.get("tls.ca.configMap"))) is not None:
        try:
            # Not create_default_context, which trusts the system's authorities where these are "".
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(cadata=authorities.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise PolicyError("spec.metrics.prometheus.tls.ca", f"no certificates in PEM: {error}") from None
    return Endpoint(
        url=f"{base}/api/v1/query",
        base=_without_password(base),
        headers=headers,
        tls=context,
        server_name=None if tls is None else tls.server_name,
    )


def _printable(path: str, value: bytes) -> str:
    if not value or not value.isascii() or not value.decode("ascii").isprintable():
        raise PolicyError(f"spec.metrics.prometheus.{path}", "the token is empty, or has bytes that no header may have")
    return value.decode("ascii")


def _without_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


class PrometheusError(Exception):
    """The server gave no answer of use; says what is wrong and what to do, in one line."""


class _TooLargeError(PrometheusError):
    """Fewer pods in one question would do."""


class _Data(Struct):
    resultType: str = ""  # noqa: N815 - as on the wire
    result: list[Series] = field(default_factory=list)


class _Answer(Struct):
    status: str
    data: _Data | None = None
    errorType: str = ""  # noqa: N815 - likewise
    error: str = ""
    warnings: list[str] = field(default_factory=list)


_decoder = msgspec.json.Decoder(_Answer)
_errors = msgspec.json.Decoder(dict[str, object])


def open_session() -> aiohttp.ClientSession:
    """Open what all sources ask through. Bodies stay as they come: a small one can't unpack into a large one.

    Each asks one question at a time; who waited for a hundred others' that hang would find its own server silent.
    """
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(connector=connector, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar())


class Prometheus:
    """Reads one policy's pods. ``stale_after`` in seconds; ``session`` is shared, and closed by whoever opened it."""

    def __init__(
        self,
        where: Endpoint,
        session: aiohttp.ClientSession,
        *,
        stale_after: float,
        labels: LabelNames = POD_MONITOR,
        timeout: float = TIMEOUT,
    ) -> None:
        self._where = where
        self._session = session
        self._stale_after = stale_after
        self._labels = labels
        self._timeout = timeout
        self._pods = PODS
        self._read: dict[str, float] = {}
        """By pod UID: when the scrape was that was read last, on Prometheus's clock."""

    async def read(self, namespace: str, pods: Collection[Pod], now: float) -> dict[str, Reading]:
        """Return what is new of pods by their UID, each with a report or an error that says what to do.

        ``now``: seconds of the operator's monotonic clock. ``Reading.at`` is when the pod was scraped on that clock,
        ``Reading.report.stats.at`` on Prometheus's. A pod not scraped since the last call has none: reports are large.
        Raises nothing: whatever fails is the error of the pods that it concerns.
        """
        self._read = {pod.uid: self._read[pod.uid] for pod in pods if pod.uid in self._read}
        readings: dict[str, Reading] = {}
        try:
            question = ages(self._labels, namespace, [pod.name for pod in pods])
            fresh = freshness(await self._ask(question, "vector"), self._labels)
        except PrometheusError as error:
            return {pod.uid: Reading(now, None, str(error)) for pod in pods}
        to_read: dict[str, Pod] = {}
        for pod in pods:
            scraped = fresh.get(pod.name)
            if scraped is None or scraped.age > self._stale_after:
                readings[pod.uid] = Reading(now, None, self._silence(namespace, pod.name, scraped))
            elif pod.uid not in self._read or self._read[pod.uid] < scraped.at:
                to_read[pod.name] = pod
        left = sorted(to_read)
        while left:
            some, left = left[: self._pods], left[self._pods :]
            try:
                question = everything(self._labels, namespace, some, self._stale_after)
                found = reports(await self._ask(question, "matrix"), self._labels)
            except _TooLargeError as error:
                if len(some) > 1:
                    self._pods = len(some) // 2
                    left = [*some, *left]
                else:
                    readings[to_read[some[0]].uid] = Reading(now, None, str(error))
                continue
            except PrometheusError as error:
                readings |= {to_read[name].uid: Reading(now, None, str(error)) for name in (*some, *left)}
                break
            for name in some:
                pod, scraped = to_read[name], fresh[name]
                report = found.get(name) or UnusableError(
                    f"it has {GENERATION}, but nothing else: metric relabeling drops it"
                )
                if isinstance(report, UnusableError):
                    text = f"what Prometheus at {self._where.base} has of pod {name} can't be used: {report}"
                    readings[pod.uid] = Reading(now, None, text)
                    continue
                # On Prometheus's clock it is at least scraped.at + scraped.age by now.
                age = max(scraped.at + scraped.age - report.stats.at, 0.0)
                readings[pod.uid] = Reading(now - age, report)
                self._read[pod.uid] = report.stats.at
        return readings

    def _silence(self, namespace: str, pod: str, scraped: Fresh | None) -> str:
        if scraped is None:
            return (
                f"Prometheus at {self._where.base} has no {GENERATION}{{{self._labels.selector(namespace, [pod])}}}: "
                "is the pod among its targets, and up (chart: podMonitor.enabled), and does it give these labels?"
            )
        when = datetime.fromtimestamp(scraped.at, UTC)
        return (
            f"Prometheus at {self._where.base} scraped pod {pod} last at {when:%H:%M:%S} UTC, longer ago than "
            f"spec.metrics.staleAfter ({format_seconds(self._stale_after)}): look at the target in Prometheus, have it "
            "scraped more often, or raise staleAfter"
        )

    async def _ask(self, question: str, kind: str) -> list[Series]:
        """Ask one question of the moment.

        Raises ``PrometheusError``.
        """
        base = self._where.base
        try:
            async with self._session.post(
                self._where.url,
                # A server that would answer later than anybody waits need not work it out.
                data={"query": question, "timeout": f"{max(1, round(1000 * (self._timeout - 1)))}ms"},
                headers=self._where.headers,
                ssl=self._where.tls,
                server_hostname=self._where.server_name,
                # Not followed: what shows who we are is for this server alone.
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=self._timeout),
            ) as response:
                if 300 <= response.status < 400:
                    location = _without_password(response.headers.get("Location", "elsewhere"))[:TOLD]
                    raise PrometheusError(f"{base} redirects to {location}: set spec.metrics.prometheus.url to that")
                if (packed := response.headers.get("Content-Encoding", "identity")) != "identity":
                    raise PrometheusError(
                        f"{base} answers in {packed[:20]}, which it was asked not to: name the server itself"
                    )
                body = await self._body(response)
                if response.status != 200:
                    raise PrometheusError(_refusal(base, response.status, body))
                if response.content_type != "application/json":
                    raise PrometheusError(
                        f"{base} answers {response.content_type[:80]} instead of JSON: that is no Prometheus, or a "
                        "page that asks for a login; check spec.metrics.prometheus.url and auth"
                    )
        except TimeoutError:
            raise PrometheusError(
                f"Prometheus at {base} did not answer within {format_seconds(self._timeout)}: it is overloaded, or a "
                "NetworkPolicy drops what the operator sends"
            ) from None
        except aiohttp.ClientConnectorCertificateError as error:
            raise PrometheusError(
                f"the certificate of {base} is not trusted: {_line(error.certificate_error)}; "
                "set spec.metrics.prometheus.tls"
            ) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise PrometheusError(
                f"no Prometheus answers at {base}: {_why(error)}; check spec.metrics.prometheus.url"
            ) from None
        return _series(base, body, kind)

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > LARGEST:
                raise _TooLargeError(
                    f"Prometheus at {self._where.base} answers with more than {LARGEST // 2**20} MiB for one pod: "
                    "these are not a sidecar's metrics, or use spec.metrics.source Sidecar"
                )
        return bytes(body)


def _series(base: str, body: bytes, kind: str) -> list[Series]:
    try:
        answer = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise PrometheusError(f"{base} does not answer as Prometheus would: {_line(error)}") from None
    if answer.status != "success" or answer.data is None:
        raise PrometheusError(f"Prometheus at {base} failed: {_said(answer.errorType, answer.error)}")
    if answer.data.resultType != kind:
        raise PrometheusError(
            f"{base} does not answer as Prometheus would: {kind} was asked for, not {answer.data.resultType[:80]!r}"
        )
    return answer.data.result


def _refusal(base: str, status: int, body: bytes) -> str:
    try:
        plain = _errors.decode(body)
        said = _said(plain.get("errorType", ""), plain.get("error", ""))
    except (msgspec.DecodeError, RecursionError):
        # Whatever else answered, its page is nothing for a status that more people read than may read the server.
        said = ""
    said = f": {said}" if said else ""
    match status:
        case 401 | 403:
            return (
                f"Prometheus at {base} refuses the operator's credentials ({status}{said}): check the Secret that "
                "spec.metrics.prometheus.auth names"
            )
        case 404 | 405:
            return (
                f"{base} has no Prometheus API ({status}): spec.metrics.prometheus.url is its base without /api/v1, "
                "such as http://prometheus.monitoring:9090"
            )
        case 400 | 422:
            return f"Prometheus at {base} can't answer ({status}{said}): raise its limits, or use source Sidecar"
        case 429 | 502 | 503 | 504:
            return (
                f"Prometheus at {base} is starting, overloaded or behind a proxy that can't reach it ({status}{said})"
            )
        case _:
            return f"Prometheus at {base} answers {status}{said}"


def _why(error: Exception) -> str:
    match error:
        case aiohttp.ClientConnectorError(os_error=OSError(errno=int(number))) if number > 0:
            return os.strerror(number)
        case aiohttp.ClientConnectorError(os_error=OSError(strerror=str(text))):
            return text
        case aiohttp.InvalidURL() | UnicodeError():
            return "that is no address"  # though it passes the pattern: port 99999, say
        case _:
            return _line(error)


def _said(*parts: object) -> str:
    """Put together what the server says, as one bounded line."""
    return _line(": ".join(str(part) for part in parts if part))


def _line(text: object) -> str:
    return "".join(each if each.isprintable() else " " for each in str(text))[:TOLD]
