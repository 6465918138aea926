from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from openapi import faults, filled
from specs import right

from carpool.policy.parameters import Parameters
from carpool_operator.api import crd
from carpool_operator.api.spec import read_policy, written
from carpool_operator.api.status import (
    Applied,
    Condition,
    ConditionStatus,
    Figures,
    HistoryEntry,
    LastDecision,
    Status,
    TargetModel,
    TargetStatus,
)

RESOURCE = crd.resource()
VERSION = RESOURCE["spec"]["versions"][0]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]["properties"]
MINIMAL = {"targetRefs": [{"name": "resnet"}], "slo": {"latency": {"p99": "50ms"}}}


def objects(schema, path=""):
    """Every schema inside one, with its path."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from objects(inner, f"{path}.{name}")
    if "items" in schema:
        yield from objects(schema["items"], f"{path}[]")


def at(path, schema=SCHEMA["spec"]):
    return dict(objects(schema))[path]


def test_it_is_called_as_people_call_it():
    assert RESOURCE["metadata"]["name"] == "batchingpolicies.carpool.dev"
    assert RESOURCE["spec"]["names"]["shortNames"] == ["bp"]
    assert VERSION["subresources"] == {"status": {}}
    assert [each["name"] for each in VERSION["additionalPrinterColumns"]] == [
        "Mode", "Batch", "Wait", "P99", "SLO", "Ready", "Reason", "Age",
    ]  # fmt: skip


def test_every_field_says_what_it_is_for():
    for part in ("spec", "status"):
        for path, schema in objects(SCHEMA[part]):
            if not path.endswith("[]"):
                assert schema["description"].endswith((".", "`")), path


def test_all_that_rules_read_is_bounded():
    # The server adds up the greatest cost of every rule, and takes none of unknown cost.
    for path, schema in objects(SCHEMA["spec"]):
        if schema.get("type") == "array":
            assert schema["maxItems"] <= 64, path
        if schema.get("type") == "string":
            assert "maxLength" in schema or "enum" in schema, path


def test_lists_declare_the_keys_that_distinguish_their_entries():
    assert at(".targetRefs")["x-kubernetes-list-map-keys"] == ["group", "kind", "name"]
    assert at(".models")["x-kubernetes-list-map-keys"] == ["name"]
    assert at(".conditions", SCHEMA["status"])["x-kubernetes-list-map-keys"] == ["type"]
    for part in ("spec", "status"):
        for path, schema in objects(SCHEMA[part]):
            if schema.get("type") == "array":
                assert schema["x-kubernetes-list-type"] in {"map", "atomic"}, path


def test_defaults_are_filled_in_and_mean_what_leaving_them_out_means():
    full = filled(MINIMAL, SCHEMA["spec"])
    assert full["tuning"]["mode"] == "Apply"
    assert full["metrics"] == {"source": "Sidecar"}
    assert full["targetRefs"] == [{"group": "apps", "kind": "Deployment", "name": "resnet"}]
    # The wait's bound follows the SLO, and the baseline the bounds: neither has one value for all.
    assert "bounds" not in full
    assert "baseline" not in full
    assert read_policy({"spec": full}) == read_policy({"spec": MINIMAL})


def test_only_the_status_knows_microseconds():
    assert not list(faults("1ms250us", at(".applied.parameters.maxWait", SCHEMA["status"])))
    assert list(faults("1ms250us", at(".baseline.maxWait")))
    assert not any("default" in schema for _, schema in objects(SCHEMA["status"]))


@given(right)
def test_the_schema_takes_what_the_types_take(plain):
    read = read_policy({"spec": plain})
    for spec in (plain, written(read)):
        assert list(faults(filled(spec, SCHEMA["spec"]), SCHEMA["spec"])) == []
    # What the server stores, defaults and all, is read as what was written.
    assert read_policy({"spec": filled(written(read), SCHEMA["spec"])}) == read


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (".slo.latency.p99", "50"),
        (".slo.latency.p99", 50),
        (".tuning.mode", "apply"),
        (".tuning.riskier.maxFactor", 1),
        (".tuning.tolerancePercent", 101),
        (".admission.maxQueuedBytes", -1),
        (".admission.maxQueuedBytes", "1.5Gi"),
        (".models[].name", ""),
        (".models", [{"name": "a"}, {"name": "a"}]),
        (".targetRefs", []),
        (".canary.percent", 51),
        (".metrics.prometheus.url", "ftp://x"),
        (".bounds", {"maxBach": {}}),
    ],
)
def test_the_schema_alone_refuses(path, value):
    assert list(faults(value, at(path)))


def test_a_full_status_fits():
    time, parameters = "2026-11-21T17:16:00Z", Parameters()
    where = {"target": "Deployment/resnet", "model": "*"}
    figures = Figures(rate=12.5, miss_fraction=0.001)
    status = Status(
        observed_generation=1,
        conditions=(
            Condition(type="Ready", status=ConditionStatus.UNKNOWN, reason="NoPods", last_transition_time=time),
        ),
        applied=Applied(generation=1, at=time, parameters=parameters, batch="32", wait="0s", **where),
        last_decision=LastDecision(
            action="Held", reason="NoTraffic", message="none", at=time, observed=figures, predicted=figures, **where
        ),
        targets=(
            TargetStatus(
                kind="Deployment",
                name="resnet",
                missed=("resnet-1",),
                models=(TargetModel(name="*", generation=1, parameters=parameters),),
            ),
        ),
        history=(HistoryEntry(generation=1, at=time, parameters=parameters, reason="Started", **where),),
    )
    assert list(faults(written(status), SCHEMA["status"])) == []


def test_the_files_are_up_to_date(capsys):
    assert crd.main(["--check"]) == 0, capsys.readouterr().out


def test_a_stale_file_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(crd, "FILE", tmp_path / "crds" / "one.yaml")
    monkeypatch.setattr(crd, "TEMPLATE", tmp_path / "templates" / "two.yaml")
    assert crd.main(["--check"]) == 1
    assert "make crds" in capsys.readouterr().err
    assert crd.main([]) == 0
    assert crd.main(["--check"]) == 0
    assert yaml.safe_load((tmp_path / "crds" / "one.yaml").read_text("utf-8")) == RESOURCE


def test_the_chart_s_template_is_guarded_and_keeps_the_policies():
    first, guard, *lines, end = crd.template().splitlines()
    assert first.startswith("# Generated")
    assert (guard, end) == ("{{- if .Values.crds.install }}", "{{- end }}")
    assert not any("{{" in line or "}}" in line for line in lines)  # else helm would read them
    kept = yaml.safe_load("\n".join(lines))
    assert kept["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert kept == RESOURCE
