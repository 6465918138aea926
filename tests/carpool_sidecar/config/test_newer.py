from __future__ import annotations

import json

import pytest

from carpool.policy.plain import PolicyError
from carpool_sidecar.config.settings import parse, parse_injected

KNOWN = {
    "upstream": {"url": "http://h:1", "patience": "30s"},
    "policy": {"slo": {"latency": {"p99": "50ms"}}, "models": [{"name": "m"}, {"name": "n", "bounds": {}}]},
    "parameters": {"*": {"maxBatch": 4}, "later": {"maxBatch": 8}},
}


def test_fields_that_an_older_sidecar_does_not_know_are_left_out_wherever_they_are_and_named():
    newer = json.loads(json.dumps(KNOWN))
    newer["later"] = {"url": 1}
    newer["upstream"]["later"] = "5s"
    newer["policy"]["slo"]["latency"]["later"] = "1s"
    newer["policy"]["models"][1]["bounds"]["later"] = {}
    newer["parameters"]["later"]["later"] = 5
    config, ignored = parse_injected(json.dumps(newer))
    assert config == parse(json.dumps(KNOWN))
    assert sorted(ignored) == [
        "later",
        "parameters.later.later",
        "policy.models[1].bounds.later",
        "policy.slo.latency.later",
        "upstream.later",
    ]
    with pytest.raises(PolicyError, match="unknown field"):
        parse(json.dumps(newer))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"upstream": {"url": 5}}, "upstream.url"),
        ({"upstream": "http://h:1"}, "upstream"),
        ({"upstream": None}, "upstream"),
        ({"policy": {"slo": []}}, "policy.slo"),
        ({"policy": {"slo": {"latency": {"p99": "50ms"}}, "models": "m"}}, "policy.models"),
        ({"parameters": []}, "parameters"),
    ],
)
def test_what_is_wrong_is_refused_as_in_a_file(change, field):
    with pytest.raises(PolicyError) as read:
        parse(json.dumps(KNOWN | change))
    with pytest.raises(PolicyError) as injected:
        parse_injected(json.dumps(KNOWN | change))
    assert str(injected.value) == str(read.value)
    assert str(read.value).startswith(field)


def test_what_is_known_is_as_in_a_file():
    assert parse_injected(json.dumps(KNOWN)) == (parse(json.dumps(KNOWN)), [])
