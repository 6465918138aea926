from __future__ import annotations

import pytest

from carpool.policy.plain import PolicyError
from carpool_sidecar.config.settings import parse

UPSTREAM = 'upstream: {url: "http://h:1"}\n'
SLO = "slo: {latency: {p99: 50ms}}"


@pytest.mark.parametrize(
    ("policy", "field", "instead"),
    [
        ("slo: 50ms", "slo", "write slo: {latency: {p99: 50ms}}"),
        ("slo: {latency: 50ms}", "slo.latency", "write latency: {p99: 50ms}"),
        (f"{SLO}, bounds: {{maxBatch: 32}}", "bounds.maxBatch", "write maxBatch: {max: 32}"),
        (f"{SLO}, bounds: {{maxWait: 10ms}}", "bounds.maxWait", "write maxWait: {max: 10ms}"),
        (f"{SLO}, bounds: 5", "bounds", "its fields are maxBatch, maxWait, maxInFlight"),
        (f"{SLO}, targetUtilizationPercent: 60%", "targetUtilizationPercent", "write targetUtilizationPercent: 60"),
        (f"{SLO}, targetUtilizationPercent: 0.6", "targetUtilizationPercent", "write targetUtilizationPercent: 60"),
        (f"{SLO}, targetUtilizationPercent: 600%", "targetUtilizationPercent", "a whole number is expected"),
        (f"{SLO}, tuning: Recommend", "tuning", "write tuning: {mode: Recommend}"),
        (f"{SLO}, tuning: off", "tuning", "write tuning: {mode: Hold}"),
        (f"{SLO}, passThrough: true", "passThrough", "write passThrough: {mode: Always}"),
        (f"{SLO}, verification: Never", "verification", "write verification: {mode: Never}"),
        (f"{SLO}, tuning: {{mode: off}}", "tuning.mode", "write it in quotes"),
        (f"{SLO}, models: {{a: {{axis: First}}}}", "models", "write a list"),
        (f"{SLO}, models: [{{name: 5}}]", "models[0].name", "write it in quotes"),
        (f"{SLO}, batchAcross: authorization", "batchAcross", "write batchAcross: [authorization]"),
        (f"{SLO}, batchAcross: [X-User]", "batchAcross[0]", "write 'X-User' in lower case: x-user"),
        (f"{SLO}, objectiv: Latency", "", "did you mean objective?"),
        (f"{SLO}, mode: Hold", "", "did you mean tuning.mode or passThrough.mode or verification.mode?"),
        (f"{SLO}, speed: 1", "", "there are slo, objective"),
        ("", "", "write e.g. slo: {latency: {p99: 50ms}}"),
    ],
)
def test_what_to_write_in_a_policy(policy, field, instead):
    with pytest.raises(PolicyError) as caught:
        parse(f"{UPSTREAM}policy: {{{policy}}}\n")
    assert caught.value.field == (f"policy.{field}" if field else "policy")
    assert instead in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "field", "instead"),
    [
        ("", "config", "write e.g. policy: {slo: {latency: {p99: 50ms}}}"),
        ("policy:\n", "policy", "nothing where a mapping is expected: write e.g. policy: {slo"),
        (f"policy: {{{SLO}}}\nadmission: {{timeout: 1s}}", "config", "write it under policy"),
        (f"policy: {{{SLO}}}\ngeneration: {{maxRunning: 3}}", "generation", "write it under policy"),
        (f"policy: {{{SLO}}}\nparameters: {{m: {{}}, n: 8}}", "parameters[n]", "its fields are maxBatch"),
        (f"policy: {{{SLO}, parameters: {{}}}}", "policy", "write it at the top level of the file, beside policy"),
    ],
)
def test_what_to_write_in_a_file(fields, field, instead):
    with pytest.raises(PolicyError) as caught:
        parse(UPSTREAM + fields)
    assert caught.value.field == field
    assert instead in str(caught.value)


def test_a_proposal_is_taken():
    """What is proposed is tried on the whole file first: it may have other problems, but not at that place."""
    with pytest.raises(PolicyError, match=r"bounds: a list where a mapping is expected: its fields are"):
        parse(f"{UPSTREAM}policy: {{{SLO}, bounds: [32]}}")
