"""What KEDA's `metrics-api` scaler reads (2.20, pkg/scalers/metrics_api_scaler.go): a number in JSON, from each pod.

Of GJSON's paths it knows names with dots between them. Wildcards, modifiers and array indexes have no use here.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

Slices = list[dict[str, Any]]

KNOWN = {
    "targetValue", "activationTargetValue", "url", "format", "valueLocation", "aggregateFromKubeServiceEndpoints",
    "aggregationType", "timeout",
}  # fmt: skip
PATIENCE = 3.0  # KEDA_HTTP_DEFAULT_TIMEOUT


class ScalerError(Exception):
    """KEDA gets no value; its HPA then changes nothing."""


def read(metadata: Mapping[str, str], slices: Callable[[str, str], Slices]) -> float:
    """Return the metric of a trigger; ``slices``: a Service's EndpointSlices by namespace and name.

    Raises ``ScalerError``. Pods that give no value are left out of a sum, as KEDA does, unless none does.
    """
    assert not metadata.keys() - KNOWN, "fields that KEDA does not have, or that are not read here"
    assert metadata.get("format", "json") == "json"
    if metadata.get("aggregateFromKubeServiceEndpoints") != "true":
        return _value(metadata["url"], metadata["valueLocation"])
    assert metadata["aggregationType"] == "sum"
    service, namespace, *_ = (urlsplit(metadata["url"]).hostname or "").split(".")
    urls = list(addresses(metadata["url"], slices(namespace, service)))
    found: list[float] = []
    for url in urls:
        try:
            found.append(_value(url, metadata["valueLocation"]))
        except ScalerError:
            continue
    if not found:
        raise ScalerError(f"no value from {urls}")
    return sum(found)


def addresses(url: str, slices: Slices) -> Iterator[str]:
    """Yield the URL of each ready pod; one whose slice has no such port is asked at the scheme's."""
    parts, seen = urlsplit(url), set()
    for one in slices:
        port = f":{parts.port}" if parts.port in {each["port"] for each in one.get("ports") or []} else ""
        for address in _ready(one):
            if address not in seen:
                seen.add(address)
                yield f"{parts.scheme}://{address}{port}{parts.path}"


def _ready(one: Mapping[str, Any]) -> Iterable[str]:
    for endpoint in one.get("endpoints") or []:
        if endpoint.get("conditions", {}).get("ready", True):
            yield from endpoint["addresses"]


def _value(url: str, location: str) -> float:
    try:
        with urlopen(url, timeout=PATIENCE) as answer:  # noqa: S310 - of the test's own cluster
            status, body = answer.status, answer.read()
    except HTTPError as error:
        error.close()
        raise ScalerError(f"{url}: api returned {error.code}") from error
    except OSError as error:
        raise ScalerError(f"{url}: {error}") from error
    if status != 200:
        raise ScalerError(f"{url}: api returned {status}")
    return located(body, location)


def located(body: bytes, location: str) -> float:
    """Return the number at a place in a document."""
    assert re.fullmatch(r"\w+(\.\w+)*", location), f"{location}: a GJSON path that is not read here"
    found = json.loads(body)
    for name in location.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise ScalerError(f'valueLocation "{location}" must point to a numeric value, got {found!r}')
    return float(found)
