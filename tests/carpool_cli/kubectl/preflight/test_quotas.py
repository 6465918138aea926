"""Quotas that hold some of a workload's pods with sidecars, and not all."""

from __future__ import annotations

import json
import shlex

import pytest
from model_in_shop import around, sent, subject, template

from carpool_cli.kubectl.preflight import checks
from carpool_cli.kubectl.preflight.dry_run import Dry, locally
from carpool_cli.manifest_checks.findings import Effect


def quota(used, name="q", scopes=None, **hard):
    hard = {key.replace("_", "."): value for key, value in hard.items()}
    spec = {"hard": hard, **({"scopes": scopes} if scopes else {})}
    return {"metadata": {"name": name}, "spec": spec, "status": {"hard": hard, "used": dict.fromkeys(hard, used)}}


MADE = template(resources={"requests": {"cpu": "2"}, "limits": {"memory": "1Gi"}})


def look(quotas, *, replicas=4, running=4, made=MADE, stored=MADE, limit_ranges=()):
    """Preflight of a Deployment whose pods the quotas count; no server makes one more.

    ``made``: its template. ``stored``: the pods that run, which a server made of it.
    """
    dry = [Dry(None, "exceeded quota: q", sent(made, inject=inject)) for inject in (False, True)]
    near = around(quotas=quotas, limit_ranges=limit_ranges)
    found = checks.all_of(subject(spec={"replicas": replicas}), *dry, near, [stored] * running)
    assert found[0].code == "NoRoomForDryRun"
    return found[1:]


def test_the_sidecars_of_all_pods_count():
    """Three pods of 2.5 CPU use 7.5 of 9, which leaves too little for the fourth, with a sidecar and without."""
    (finding,) = look([quota("8", requests_cpu="9")])

    assert (finding.code, finding.effect) == ("NoRoomForAll", Effect.BREAKS)
    assert "leaves 9 of requests.cpu to its 4 pods, which need 10 with sidecars" in finding.message
    assert "3 would get one, 0 would start without, and 1 would be refused" in finding.message


def test_the_commands_make_the_sidecar_smaller_or_the_quota_larger():
    (finding,) = look([quota("8", requests_cpu="9")])
    smaller, _, larger = finding.fix.partition(" asks for the least; or ")
    patch = json.loads(shlex.split(smaller)[-1])
    assert patch["spec"]["template"]["metadata"]["annotations"]["carpool.dev/sidecar-cpu"] == "100m"
    assert (
        larger == """kubectl -n shop patch resourcequota q --type=merge -p '{"spec":{"hard":{"requests.cpu":"10"}}}'"""
    )
    # 4 x 2.1 CPU are more than 8.2: the least is too much.
    (finding,) = look([quota("8", requests_cpu="8200m")])
    assert finding.fix.startswith("kubectl -n shop patch resourcequota q ")


@pytest.mark.parametrize(
    ("quotas", "options"),
    [
        ([quota("8", requests_cpu="10")], {}),
        ([quota("8", requests_cpu="9")], {"replicas": 3, "running": 4}),
        ([quota("0", requests_cpu="10")], {"running": 0}),
        ([quota("4", pods="4")], {}),
        ([quota("8", requests_cpu="9", scopes=["BestEffort"])], {}),
        ([quota("0", requests_cpu="9")], {"replicas": 0, "running": 0}),
    ],
)
def test_what_has_room_is_not_said(quotas, options):
    assert look(quotas, **options) == []


def test_others_use_the_quota_too():
    """Others use 4 of 13, so that 9 are left."""
    (finding,) = look([quota("12", requests_cpu="13")])
    assert "leaves 9 of requests.cpu" in finding.message
    assert '"requests.cpu":"14"' in finding.fix


def test_pods_that_start_without_a_sidecar_break_nothing():
    """Of 9.9 CPU three pods with a sidecar leave 2.4: one more without."""
    (finding,) = look([quota("8", requests_cpu="9900m")])
    assert finding.effect is Effect.NO_BATCHING
    assert "3 would get one, 1 would start without, and 0 would be refused" in finding.message


def test_memory_counts_likewise():
    """The sidecar's limit is 512Mi: 4 x 1.5Gi of 5Gi."""
    (finding,) = look([quota("4Gi", limits_memory="5Gi")])
    assert "need 6Gi with sidecars: 3 would get one" in finding.message
    assert '"limits.memory":"6Gi"' in finding.fix


def limit_range(**item):
    return {"metadata": {"name": "l"}, "spec": {"limits": [{"type": "Container", **item}]}}


DEFAULT = {"limit_ranges": [limit_range(defaultRequest={"cpu": "2"})], "made": template()}
"""Of pods that don't say how much CPU they want, and get 2 by a LimitRange."""


def test_what_a_limit_range_gives_the_model_counts():
    """4 x 2.5 CPU of 9; 4 x 2.1 are more than 8.2."""
    (finding,) = look([quota("8", requests_cpu="9")], **DEFAULT)
    assert "leaves 9 of requests.cpu to its 4 pods, which need 10 with sidecars" in finding.message
    assert " asks for the least; or " in finding.fix
    (finding,) = look([quota("8", requests_cpu="8200m")], **DEFAULT)
    assert finding.fix.startswith("kubectl -n shop patch resourcequota q ")


def test_the_least_is_beside_the_model_as_the_server_stores_it():
    """Here the server answers: 4 x 2.5 CPU of 8.2, and 4 x 2.1 are too many as well."""
    plain = sent(MADE, inject=False)
    asked = sent(template(), inject=True)
    near = around(quotas=[quota("8", requests_cpu="8200m")])
    injected = locally(sent(MADE, inject=True), near)

    (finding,) = checks.all_of(
        subject(spec={"replicas": 4}), Dry(plain, "", asked), Dry(injected, "", asked), near, [MADE] * 4
    )

    assert finding.fix.startswith("kubectl -n shop patch resourcequota q ")


def test_a_limit_that_a_container_has_is_its_request_before_a_default():
    """A model limited to 1 CPU requests that, and not the default of 2: 4 x 1.5 CPU have room in 6."""
    limited = {**DEFAULT, "made": template(resources={"limits": {"cpu": "1"}})}
    limited["stored"] = template(resources={"limits": {"cpu": "1"}, "requests": {"cpu": "1"}})
    assert look([quota("4", requests_cpu="6")], **limited) == []
    (finding,) = look([quota("4", requests_cpu="5900m")], **limited)
    assert "need 6 with sidecars" in finding.message
