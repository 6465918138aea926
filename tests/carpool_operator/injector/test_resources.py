"""Quantities as Kubernetes writes them, and what a pod asks for in all."""

from __future__ import annotations

import pytest

from carpool_operator.injector.resources import amount, amount_text, is_guaranteed, total


@pytest.mark.parametrize(
    ("text", "resource", "value"),
    [
        ("500m", "cpu", 500),
        ("0.1", "cpu", 100),
        (2, "cpu", 2000),
        ("1.5", "cpu", 1500),
        ("100u", "cpu", 1),
        ("1e3", "memory", 1000),
        ("128Mi", "memory", 128 * 2**20),
        ("1.5Gi", "memory", 3 * 2**29),
        ("1G", "memory", 10**9),
        ("128974848", "memory", 128974848),
        ("1E", "memory", 10**18),
        ("2Ei", "memory", 2**61),
        ("5.", "memory", 5),
        ("100m", "memory", 1),
    ],
)
def test_a_quantity_is_read_as_the_server_reads_it(text, resource, value):
    assert amount(text, resource) == value


@pytest.mark.parametrize("text", ["", "x", "1X", "Mi", "1 Gi", "--1"])
def test_what_is_no_quantity_is_an_error(text):
    with pytest.raises(ValueError, match="no quantity"):
        amount(text, "memory")


def test_amounts_are_written_shortly():
    assert [amount_text(value, "cpu") for value in (2000, 2500)] == ["2", "2500m"]
    assert [amount_text(value, "memory") for value in (2**30, 1000)] == ["1Gi", "1000"]


def container(cpu, **more):
    return {"resources": {"requests": {"cpu": cpu}}, **more}


def test_init_containers_run_one_after_the_other_and_native_sidecars_beside_all():
    spec = {"containers": [container("1"), container("500m"), {}]}
    assert total(spec, "requests", "cpu") == 1500
    spec["initContainers"] = [container("2")]
    assert total(spec, "requests", "cpu") == 2000
    spec["initContainers"] = [container("1", restartPolicy="Always"), container("2")]
    assert total(spec, "requests", "cpu") == 3000
    spec["initContainers"].reverse()
    assert total(spec, "requests", "cpu") == 2500
    spec["overhead"] = {"cpu": "250m"}
    assert total(spec, "requests", "cpu") == 2750
    spec["resources"] = {"requests": {"cpu": "4"}}
    assert total(spec, "requests", "cpu") == 4250
    assert total(spec, "limits", "cpu") == 250


def test_a_pod_is_guaranteed_by_all_of_its_containers_or_as_a_whole():
    same = {"resources": {"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "1000m"}}}
    assert is_guaranteed({"containers": [same]})
    assert not is_guaranteed({"containers": [same, container("1")]})
    assert is_guaranteed({"containers": [container("1")], "resources": same["resources"]})
    assert not is_guaranteed({"containers": [same], "resources": {"requests": {"cpu": "2"}}})


def test_a_quantity_of_more_digits_than_anything_has_is_none_at_once():
    for text in ("1e7000000", "1e100", "1" * 50):
        with pytest.raises(ValueError, match="no quantity"):
            amount(text, "cpu")


def test_a_limit_that_a_template_took_out_is_none():
    spec = {"containers": [{"name": "m", "resources": {"limits": {"cpu": None, "memory": "1Gi"}}}]}
    assert not is_guaranteed(spec)
