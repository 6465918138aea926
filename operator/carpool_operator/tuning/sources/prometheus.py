"""Reads the counters of a policy's pods from a Prometheus server, over its HTTP API. It decides nothing.

Two queries, each consistent in itself. The first returns each pod's last scrape: one small number per pod, and its age
by Prometheus's own clock, so that no clock here is compared with one there. The second returns all samples within
``stale_after`` of pods scraped since the last reading (``scrapes`` explains why raw samples). Nothing older is ever
read.

Errors appear in statuses, which are written when they differ. So they contain no ages, and no text of a page that may
contain anything.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

import aiohttp
import msgspec
from msgspec import Struct, field

from carpool.policy.durations import format_seconds
from carpool_operator.api.model import Reading
from carpool_operator.tuning.sources.endpoint import without_password
from carpool_operator.tuning.sources.engines import counters, question
from carpool_operator.tuning.sources.samples import UnusableError
from carpool_operator.tuning.sources.scrapes import (
    GENERATION,
    POD_MONITOR,
    LabelNames,
    Series,
    ages,
    everything,
    freshness,
    reports,
)
from carpool_operator.tuning.sources.tokens import TokenError, Tokens

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from carpool.generation.observed import Counters
    from carpool_operator.api.model import Pod
    from carpool_operator.tuning.sources.endpoint import Endpoint
    from carpool_operator.tuning.sources.scrapes import Fresh, Source

TIMEOUT = 10.0
"""Timeout of one query in seconds, from connecting to the answer's last byte; the server gets one second less.
"""

LARGEST = 16 * 2**20
"""Most bytes of an answer, unpacked. A busy sidecar has 2,000 kinds of batches, 6,000 series of 300 bytes: 2 MiB."""

PODS = 16
"""Pods per query at first; halved whenever an answer is too large."""

LONGEST_ERROR = 300
"""Most characters kept of the server's own error message."""


class PrometheusError(Exception):
    """The server gave no usable answer; the message has the problem and the fix, in one line."""


class _TooLargeError(PrometheusError):
    """A query with fewer pods would succeed."""


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
    """Open the session that all sources share. Bodies are not decompressed: a small one can't unpack into a large one.

    Each source sends one query at a time. With a limit on connections, a source could wait for a hundred hanging
    queries of others and report its own server as silent.
    """
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(connector=connector, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar())


class _Read(NamedTuple):
    """The last reading of a pod."""

    source: Source
    at: float
    """Time of the scrape, on Prometheus's clock."""


class Prometheus:
    """Reads one policy's pods. ``stale_after`` in seconds; ``session`` is shared, and closed by its opener."""

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
        self._tokens = None if where.grant is None else Tokens(where.grant, session, timeout)
        self._pods = PODS
        self._read: dict[str, _Read] = {}
        """By pod UID."""

    async def read(self, namespace: str, pods: Collection[Pod], now: float) -> dict[str, Reading]:
        """Return new readings of pods by their UID, each with a report or an error that includes the fix.

        ``now``: seconds of the operator's monotonic clock. ``Reading.at`` is the time of the pod's scrape on that
        clock, ``Reading.report.stats.at`` on Prometheus's. A pod not scraped since the last call is left out: reports
        are large. Raises nothing: a failure becomes the error of the pods concerned.
        """
        self._read = {pod.uid: self._read[pod.uid] for pod in pods if pod.uid in self._read}
        readings: dict[str, Reading] = {}
        try:
            await self._authorize(now)
            asked = ages(self._labels, namespace, [pod.name for pod in pods])
            sources = freshness(await self._ask(asked, "vector"), self._labels)
        except PrometheusError as error:
            return {pod.uid: Reading(now, None, str(error)) for pod in pods}
        to_read: dict[str, Pod] = {}
        chosen, fresh = {}, {}
        for pod in pods:
            if pod.name not in sources:
                readings[pod.uid] = Reading(now, None, self._silence(namespace, pod.name, None))
                continue
            source = chosen[pod.name] = self._choice(pod.uid, sources[pod.name])
            scraped = fresh[pod.name] = sources[pod.name][source]
            if scraped.age > self._stale_after:
                readings[pod.uid] = Reading(now, None, self._silence(namespace, pod.name, scraped))
            elif pod.uid not in self._read or self._read[pod.uid].at < scraped.at:
                to_read[pod.name] = pod
        left = sorted(to_read)
        while left:
            some, left = left[: self._pods], left[self._pods :]
            try:
                asked = everything(self._labels, namespace, some, self._stale_after)
                found = reports(await self._ask(asked, "matrix"), self._labels, chosen)
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
                scrape = found.get(name) or UnusableError(
                    f"it has {GENERATION}, but nothing else: metric relabeling drops it"
                )
                if isinstance(scrape, UnusableError):
                    text = f"what Prometheus at {self._where.base} has of pod {name} can't be used: {scrape}"
                    readings[pod.uid] = Reading(now, None, text)
                    continue
                # On Prometheus's clock it is at least scraped.at + scraped.age now.
                age = max(scraped.at + scraped.age - scrape.report.stats.at, 0.0)
                readings[pod.uid] = Reading(now - age, scrape.report, note=scrape.note)
                self._read[pod.uid] = _Read(chosen[name], scrape.report.stats.at)
        return readings

    async def engines(self, namespace: str, pods: Collection[str], now: float) -> dict[str, Counters | str]:
        """Return the counters of engines by the pod's name, or the error, for every one of ``pods``."""
        try:
            await self._authorize(now)
            series = await self._ask(question(self._labels, namespace, pods, self._stale_after), "matrix")
        except PrometheusError as error:
            return dict.fromkeys(pods, str(error))
        found = counters(series, self._labels)
        silent = f"Prometheus at {self._where.base} has no metrics of vLLM or SGLang of it: is it scraped?"
        return {pod: found.get(pod, silent) for pod in pods}

    def _choice(self, uid: str, sources: Mapping[Source, Fresh]) -> Source:
        """Keep the source that was read before: two replicas' clocks differ. If it ended, choose another."""
        newest = max(sources, key=lambda source: (sources[source].at, sorted(source)))
        before = self._read[uid].source if uid in self._read else newest
        ended = before not in sources or sources[newest].at - sources[before].at > self._stale_after / 2
        return newest if ended else before

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

    async def _authorize(self, now: float) -> None:
        """Get a token that is valid for this reading, if the server needs one.

        Raises ``PrometheusError``.
        """
        if self._tokens is None:
            return
        try:
            self._where.headers["Authorization"] = await self._tokens.header(now)
        except TokenError as error:
            raise PrometheusError(str(error)) from None

    async def _ask(self, question: str, kind: str) -> list[Series]:
        """Send one instant query.

        Raises ``PrometheusError``.
        """
        base = self._where.base
        try:
            async with self._session.post(
                self._where.url,
                # The server should not go on computing after our timeout.
                data={"query": question, "timeout": f"{max(1, round(1000 * (self._timeout - 1)))}ms"},
                headers=self._where.headers,
                ssl=self._where.tls,
                server_hostname=self._where.server_name,
                # Redirects are not followed: the credentials are for this server only.
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=self._timeout),
            ) as response:
                if 300 <= response.status < 400:
                    location = without_password(response.headers.get("Location", "elsewhere"))[:LONGEST_ERROR]
                    raise PrometheusError(f"{base} redirects to {location}: set spec.metrics.prometheus.url to that")
                if (packed := response.headers.get("Content-Encoding", "identity")) != "identity":
                    raise PrometheusError(
                        f"{base} answers in {packed[:20]}, which it was asked not to: name the server itself"
                    )
                body = await self._body(response)
                if response.status == 401 and self._tokens is not None:
                    self._tokens.forget()
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
        # A page of some other server must not appear in a status: more users may read the status than may read that
        # server.
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
            return "that is no address"  # matches the pattern, but is invalid: port 99999, say
        case _:
            return _line(error)


def _said(*parts: object) -> str:
    """Combine the server's error messages into one bounded line."""
    return _line(": ".join(str(part) for part in parts if part))


def _line(text: object) -> str:
    return "".join(each if each.isprintable() else " " for each in str(text))[:LONGEST_ERROR]
