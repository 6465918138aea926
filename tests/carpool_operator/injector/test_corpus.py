"""Pods as clusters have them: each has its sidecar, or says why it has none and what to do; and back again."""

from __future__ import annotations

import copy
import json

import pytest
import yaml

from carpool_operator.injector.decide import InjectorSettings
from carpool_operator.injector.jsonpatch import diff
from carpool_operator.injector.patch import unpatch
from carpool_operator.injector.reasons import Reason
from carpool_operator.webhook.review import judge
from carpool_sidecar.config.settings import parse

from .corpus import at, cases

SETTINGS = InjectorSettings(image="carpool-sidecar:test", version="test", public_key="ab" * 32)
CASES = cases()
INJECTED = [case for case in CASES if "container" in case.expect]
SKIPPED = [case for case in CASES if "skipped" in case.expect]


def admit(case, pod=None):
    request = {"uid": "u", "kind": {"kind": "Pod"}, "namespace": "models", "object": pod or case.pod}
    return judge(request, SETTINGS, "0123456789abcdef", around=case.around)


def name(case):
    return case.name


def config_of(pod):
    return json.loads(at(pod, ["spec", "initContainers", "carpool", "env", 0, "value"]).replace("$$", "$"))


def test_it_is_large_enough():
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", INJECTED, ids=name)
def test_a_sidecar_stands_where_it_should(case):
    answer = admit(case)
    assert answer.result == "Injected", answer.of
    status = json.loads(answer.changed["metadata"]["annotations"]["carpool.dev/status"])
    assert (status["container"], status["port"]) == (case.expect["container"], case.expect["port"])
    assert status["notes"] == case.expect.get("notes", [])
    for place in case.expect.get("has", []):
        assert at(answer.changed, place["at"]) == place["is"]
    config = config_of(answer.changed)
    assert parse(json.dumps(config)).upstream.url == f"http://localhost:{status['port']}"
    for part, values in case.expect.get("config", {}).items():
        assert {**config[part], **values} == config[part]


@pytest.mark.parametrize("case", INJECTED, ids=name)
def test_injecting_twice_changes_nothing(case):
    once = admit(case).changed
    again = admit(case, once)
    assert again.changed is once
    assert again.result == Reason.ALREADY_INJECTED


@pytest.mark.parametrize("case", INJECTED, ids=name)
def test_what_was_injected_is_taken_out_to_the_byte(case):
    before = json.dumps(case.pod)
    assert json.dumps(unpatch(admit(case).changed)) == before
    assert yaml.safe_dump(unpatch(json.loads(json.dumps(admit(case).changed))), sort_keys=False) == yaml.safe_dump(
        case.pod, sort_keys=False
    )


@pytest.mark.parametrize("case", INJECTED, ids=name)
def test_what_others_add_later_stays(case):
    changed = json.loads(json.dumps(admit(case).changed))
    more = {"name": "later", "image": "x"}
    for members in ("initContainers", "containers"):
        changed["spec"][members].append(more)
    changed["metadata"]["annotations"]["later"] = "x"
    restored = unpatch(changed)
    assert at(restored, ["spec", "initContainers", "later"]) == more
    assert restored["metadata"]["annotations"]["later"] == "x"
    assert not any(each["name"] == "carpool" for each in restored["spec"]["initContainers"])


@pytest.mark.parametrize("case", SKIPPED, ids=name)
def test_a_pod_without_one_says_why(case):
    answer = admit(case)
    assert answer.result == case.expect["skipped"]
    if Reason(answer.result) in {Reason.DISABLED, Reason.ALREADY_INJECTED}:
        assert answer.changed is case.pod
        return
    (operation,) = diff(case.pod, answer.changed)  # one annotation, and nothing else
    assert operation["op"] == "add"
    assert operation["path"] == "/metadata/annotations/carpool.dev~1skipped"
    assert operation["value"].startswith(f"{case.expect['skipped']}: ")
    assert case.expect["fix"] in operation["value"]
    # Again, by a second round of webhooks
    assert admit(case, answer.changed).changed is answer.changed


def test_every_reason_of_a_pod_is_in_the_corpus():
    elsewhere = {Reason.NOT_OPTED_IN, Reason.UNKNOWN_OWNER, Reason.NO_PUBLIC_KEY, Reason.FAULT, Reason.UNKNOWN_PORT}
    elsewhere |= {Reason.SELF_TUNED}  # the operator's
    assert {case.expect["skipped"] for case in SKIPPED} == set(Reason) - elsewhere


@pytest.mark.parametrize("size", [300, 100_000, 250_000, 262_000])
def test_no_annotation_makes_a_pod_s_annotations_too_large(size):
    """The API server refuses a pod with more than 256 KiB of them."""
    for key in ("carpool.dev/port", "traffic.sidecar.istio.io/excludeInboundPorts", "example.com/note"):
        pod = copy.deepcopy(INJECTED[0].pod)
        pod["metadata"]["annotations"][key] = "9" * size
        answer = admit(INJECTED[0], pod)
        written = answer.changed["metadata"]["annotations"]
        assert sum(len(name) + len(value) for name, value in written.items()) <= 262_144
        assert len(written.get("carpool.dev/skipped", "")) < 1100
