"""Specs as people write them, right and wrong, for what has to judge them alike: the types, the schema, the server."""

from __future__ import annotations

import re

from hypothesis import strategies as st

from carpool.policy.plain import PolicyError
from carpool_operator.api.spec import read_policy

# Few values, so that bounds, baselines and promises often meet, cross and contradict each other.
waits = st.sampled_from(["0s", "1ms", "10ms", "25ms", "26ms", "50ms", "100ms", "1s", "1m30s", "1h1m1s1ms"])
rows = st.sampled_from([1, 2, 8, 32, 64, 65, 200])
slots = st.sampled_from([1, 2, 8, 9, 200])
names = st.sampled_from(["resnet", "bert", "whisper"])


def some(**fields):
    """An object with any of these fields."""
    return st.fixed_dictionaries({}, optional=fields)


def both(**fields):
    """An object with all of these fields."""
    return st.fixed_dictionaries(fields)


bounds = some(
    maxBatch=some(min=rows, max=rows), maxWait=some(min=waits, max=waits), maxInFlight=some(min=slots, max=slots)
)
key = both(name=names, key=st.just("token"))
oauth2 = st.fixed_dictionaries(
    {
        "tokenUrl": st.sampled_from(["http://sso/token", "https://sso.example/token"]),
        "clientId": key,
        "clientSecret": key,
    },
    optional={
        "scopes": st.lists(names, max_size=2),
        "audience": names,
        "ca": some(secret=key, configMap=key),
    },
)
prometheus = st.fixed_dictionaries(
    {"url": st.sampled_from(["http://prometheus:9090", "https://prometheus.monitoring/base"])},
    optional={
        "auth": some(bearer=key, basic=both(username=key, password=key), oauth2=oauth2),
        "tls": some(
            ca=some(secret=key, configMap=key),
            client=both(certificate=key, key=key),
            serverName=names,
            insecureSkipVerify=st.booleans(),
        ),
        "matchers": st.lists(both(label=st.sampled_from(["cluster", "a-b"]), value=names), max_size=2),
        "labels": some(namespace=st.just("kubernetes_namespace"), pod=st.just("kubernetes_pod_name")),
        "headers": st.lists(
            st.fixed_dictionaries(
                {"name": st.sampled_from(["X-Scope-OrgID", "AUTHORIZATION", "Host"])},
                optional={"value": st.just("tenant-1"), "secret": key},
            ),
            max_size=2,
        ),
        "interval": waits,
    },
)
KIND = {
    "group": st.sampled_from(["apps", "apps", "argoproj.io"]),
    "kind": st.sampled_from(["Deployment", "StatefulSet", "Rollout"]),
}
labels = st.fixed_dictionaries({"app": names}) | st.just({})
requirements = st.lists(
    st.fixed_dictionaries(
        {"key": names, "operator": st.sampled_from(["In", "NotIn", "Exists", "DoesNotExist"])},
        optional={"values": st.lists(names, max_size=2)},
    ),
    max_size=2,
)
specs = st.fixed_dictionaries(
    {
        "targetRefs": st.lists(
            st.fixed_dictionaries(
                {"name": names},
                optional=KIND,
            ),
            max_size=3,
        ),
        "slo": some(latency=some(p50=waits, p90=waits, p95=waits, p99=waits, p999=waits)),
    },
    optional={
        "targetSelector": st.fixed_dictionaries(
            {}, optional={**KIND, "matchLabels": labels, "matchExpressions": requirements}
        ),
        "models": st.lists(
            st.fixed_dictionaries(
                {"name": names},
                optional={"axis": st.sampled_from(["Auto", "First", "None"]), "maxBatch": rows, "bounds": bounds},
            ),
            max_size=3,
        ),
        "bounds": bounds,
        "baseline": some(maxBatch=rows, maxWait=waits, maxInFlight=slots, passThrough=st.booleans()),
        "tuning": some(
            mode=st.sampled_from(["Apply", "Recommend", "Hold"]),
            tolerancePercent=st.integers(0, 100),
            riskier=some(after=waits, minRequests=rows, maxFactor=st.sampled_from([1.5, 2, 16])),
        ),
        "passThrough": some(mode=st.sampled_from(["Automatic", "Always", "Never"])),
        "admission": some(
            maxQueuedRows=rows,
            maxQueuedBytes=st.sampled_from(["256Mi", "1G", "1000", 1000, 0]),
            maxQueuedTokens=rows,
            timeout=waits,
            shedAt=st.sampled_from(["Automatic", "SLO", "Deadline"]),
        ),
        "batchAcross": st.lists(st.sampled_from(["authorization", "x-tenant", "content-type"]), max_size=3),
        "metrics": some(source=st.sampled_from(["Sidecar", "Prometheus"]), staleAfter=waits, prometheus=prometheus),
        "fallback": some(failureThreshold=slots, behavior=st.sampled_from(["HoldLast", "Baseline"])),
        "canary": some(enabled=st.booleans(), percent=st.integers(1, 50), minRequests=rows),
    },
)


def mended(plain):
    """Take out of a spec what is refused, until nothing is."""
    while True:
        try:
            read_policy({"spec": plain})
        except PolicyError as error:
            steps = [int(step) if step.isdigit() else step for step in re.findall(r"\w+", error.field)[1:]]
            plain = NEEDED[steps[0]](plain) if steps[0] in NEEDED else without(plain, steps)
        else:
            return plain


NEEDED = {
    "slo": lambda plain: {**plain, "slo": {"latency": {"p99": "50ms"}}},
    "targetRefs": lambda plain: {**plain, "targetRefs": [{"name": "resnet"}]},
}


def without(value, steps):
    """Return a value without a field of it, or, where that is not there, without what it would be in."""
    first, *rest = steps
    inner = without(value[first], rest) if rest and (isinstance(first, int) or first in value) else None
    if isinstance(value, list):
        return [*value[:first], *([] if inner is None else [inner]), *value[first + 1 :]]
    if first not in value:
        return None
    return {name: each for name, each in value.items() if name != first} | ({} if inner is None else {first: inner})


right = specs.map(mended)


@st.composite
def near(draw):
    """Return a spec that is right, but perhaps for one part."""
    spec, other = draw(right), draw(specs)
    part = draw(st.sampled_from(sorted(other)))
    return {**spec, part: other[part]}
