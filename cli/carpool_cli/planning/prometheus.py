"""Queries a Prometheus server over its HTTP API."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode, urlsplit
from urllib.request import Request, urlopen

import msgspec
from msgspec import Struct

from carpool_cli.answers import NO_ANSWER, UNREADABLE
from carpool_cli.planning.history import STEPS, Held, HistoryError, Questions, Series, about_held

if TYPE_CHECKING:
    from collections.abc import Sequence

TOKEN = "CARPOOL_PROMETHEUS_TOKEN"  # noqa: S105 - the variable's name
"""Environment variable with a bearer token, if the server needs one."""

TIMEOUT = 60.0
"""Timeout of one query in seconds: summing up a week of many pods takes long."""

LONGEST_ERROR = 300


class _Data(Struct):
    result: list[Series] = []


class _Answer(Struct):
    status: str
    data: _Data | None = None
    error: str = ""


def held(url: str, since: float, selector: str, now: float) -> Held:
    """Return how much of the last ``since`` seconds before ``now`` (epoch) the server holds of the sidecars.

    Asked three times: of a week with ten minutes of samples, the first answer may be 20 minutes late, the second 4 s.

    Raises ``HistoryError``.
    """
    base, narrowed = _base(url), since
    interval: float | None = None
    for last in (False, False, True):
        slack = 0.0 if last else narrowed / STEPS
        first, interval = (_number(base, text, now) for text in about_held(narrowed, selector))
        if first is None or interval is None:
            # No sample at any of the 500 points in time: if there is one, it came after the last of them.
            narrowed, interval = slack, None
        else:
            # Half an interval more, so that the first sample is inside.
            narrowed = min(narrowed, now - first + max(slack, interval / 2))
    return Held(since, 0.0) if interval is None else Held(narrowed, interval)


def _number(base: str, text: str, now: float) -> float | None:
    series = _one(f"{base}/api/v1/query", {"query": text, "time": f"{now:.3f}"})
    return float(series[0].value[1]) if series and series[0].value is not None else None


def _base(url: str) -> str:
    try:
        is_base = urlsplit(url).scheme in {"http", "https"}
    except ValueError:  # an IPv6 address without its bracket
        is_base = False
    if not is_base:
        raise HistoryError(f"{url!r} is not a server's base URL: write e.g. http://prometheus:9090")
    return url.rstrip("/")


def ask(
    url: str, asked: Questions, since: float, now: float
) -> tuple[dict[str, list[Series]], dict[str, list[Series]]]:
    """Send all queries for the last ``since`` seconds before ``now`` (epoch): results over time, and at the end.

    Raises ``HistoryError``.
    """
    base = _base(url)
    # The end half a step late: the last step ends at `now`, give or take what 500 roundings to milliseconds add up to.
    end = now + asked.step / 2
    span = {"start": f"{now - since + asked.step:.3f}", "end": f"{end:.3f}", "step": f"{asked.step:.3f}"}
    ranges = {name: _one(f"{base}/api/v1/query_range", {"query": text, **span}) for name, text in asked.ranges.items()}
    at = {"time": f"{now:.3f}"}
    return ranges, {name: _one(f"{base}/api/v1/query", {"query": text, **at}) for name, text in asked.ends.items()}


def _one(url: str, fields: dict[str, str]) -> list[Series]:
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    if token := os.environ.get(TOKEN):
        headers["Authorization"] = f"Bearer {token}"
    request = Request(url, urlencode(fields).encode(), headers)  # noqa: S310 - http or https, by the caller
    try:
        with urlopen(request, timeout=TIMEOUT) as response:  # noqa: S310 - likewise
            answer = msgspec.json.decode(response.read(), type=_Answer)
        _check([] if answer.data is None else answer.data.result)
    except HTTPError as error:
        with error:
            message = error.read(LONGEST_ERROR).decode("utf-8", "replace")
        hint = f"; it may want a token, in {TOKEN}" if error.code in {401, 403} else ""
        raise HistoryError(f"{url} answered {error.code}: {message}{hint}") from None
    except (URLError, *NO_ANSWER) as error:
        why = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise HistoryError(
            f"{url} does not answer: {why}. Name the base URL of a Prometheus, or reach it "
            "first, e.g. by kubectl port-forward"
        ) from None
    except (*UNREADABLE, ValueError):
        raise HistoryError(f"{url} answered no JSON of Prometheus's: is it its base URL?") from None
    if answer.status != "success" or answer.data is None:
        raise HistoryError(f"{url}: {answer.error[:LONGEST_ERROR]}")
    return answer.data.result


def _check(result: Sequence[Series]) -> None:
    """Raise ``ValueError`` for a sample that is no number, as Prometheus writes them: ``1.5``, ``NaN``, ``+Inf``."""
    for series in result:
        for _, text in (*series.values, *([] if series.value is None else [series.value])):
            float(text)
