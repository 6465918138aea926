from __future__ import annotations

import re

import pytest

from carpool.policy.spec import TuningMode
from carpool_operator.api import annotations
from carpool_operator.api.annotations import AUTOSCALED, PREFIX, Wish, misplaced, read, read_defaults
from carpool_operator.api.spec import read_policy, written


def wish(**given) -> Wish:
    return read(
        "Deployment", "resnet", {PREFIX + name.replace("_", "-"): value for name, value in given.items()} | {"app": "x"}
    )


def test_an_annotation_with_an_slo_is_a_policy():
    spec, problems, _ = wish(slo_p99="50ms", inject="true")
    assert problems == ()
    assert spec.slo.due == 0.05
    assert [(each.kind, each.name) for each in spec.target_refs] == [("Deployment", "resnet")]


def test_all_that_can_be_said():
    spec, problems, _ = wish(
        slo_p50="10ms", slo_p90="20ms", slo_p95="30ms", slo_p99="1m30s", slo_p999="2m",
        mode="Recommend", max_batch="16", max_wait="5ms", max_in_flight="2",
    )  # fmt: skip
    assert problems == ()
    assert spec.slo.percentiles == ((0.5, 0.01), (0.9, 0.02), (0.95, 0.03), (0.99, 90.0), (0.999, 120.0))
    assert spec.tuning.mode is TuningMode.RECOMMEND
    limits = spec.limits()
    assert (limits.max_batch, limits.max_wait, limits.max_in_flight) == (16, 0.005, 2)
    assert read_policy({"spec": written(spec)}) == spec  # as the server returns it


def test_an_slo_of_token_streams():
    spec, problems, _ = wish(slo_ttft_p99="2s", slo_tpot_p99="50ms")
    assert problems == ()
    assert (spec.slo.ttft.p99, spec.slo.tpot.p99, spec.slo.latency) == (2.0, 0.05, None)
    assert read_policy({"spec": written(spec)}) == spec
    assert "latency" not in written(spec)["slo"]
    assert wish(slo_tpot_p99="50ms").problems == (
        "carpool.dev/slo-ttft-p99: slo.tpot needs it: without it requests wait without bound, e.g. p99: 2s",
    )


def test_a_class_is_a_name_behind_a_dot():
    given = {"slo-ttft-p99": "2s", "slo-tpot-p99": "50ms"}
    given |= {"slo-ttft-p99.report-2": "20s", "slo-tpot-p99.gold": "30ms", "slo-ttft-p99.gold": "1s"}
    spec, problems, _ = wish(**given)
    assert problems == ()
    gold, report = spec.slo.classes
    assert (gold.priority, gold.ttft.p99, gold.tpot.p99) == ("gold", 1.0, 0.03)
    assert (report.priority, report.ttft.p99, report.tpot) == ("report-2", 20.0, None)
    assert (spec.slo.ttft.p99, spec.slo.tpot.p99) == (2.0, 0.05)
    assert read_policy({"spec": written(spec)}) == spec


def test_default_classes_belong_to_an_slo_that_is_replaced_as_a_whole():
    defaults = {"slo-ttft-p99": "2s", "slo-tpot-p99": "50ms", "slo-ttft-p99.gold": "1s"}
    good, problems = read_defaults({PREFIX + key: value for key, value in defaults.items()})
    assert problems == ()
    spec, problems, by_default = read("Deployment", "llama", {PREFIX + "inject": "true"}, good)
    assert (problems, by_default) == ((), True)
    assert [(each.priority, each.ttft.p99) for each in spec.slo.classes] == [("gold", 1.0)]
    own = read("Deployment", "llama", {PREFIX + "slo-ttft-p99": "3s"}, good)
    assert (own.spec.slo.ttft.p99, own.spec.slo.tpot, own.spec.slo.classes) == (3.0, None, ())
    assert annotations.asks({PREFIX + "slo-ttft-p99.gold": "1s"})


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            {"slo-ttft-p99.gold": "1s"},
            "slo-ttft-p99.gold is of a class: add carpool.dev/slo-ttft-p99 for the requests",
        ),
        ({"slo-p99": "1s", "slo-tpot-p99.gold": "1s"}, "slo-tpot-p99.gold is of a class: add carpool.dev/slo-ttft-p99"),
        ({"slo-ttft-p99": "2s", "slo-ttft-p99.gold": "1"}, "slo-ttft-p99.gold is '1': write a duration, e.g. 50ms"),
        (
            {"slo-ttft-p99": "2s", "slo-ttft-p99.gold": "1s", "slo-tpot-p99.zinc": "0s"},
            "slo-tpot-p99.zinc: must be longer",
        ),
        ({"slo-ttft-p99": "2s", "slo-ttft-p99.batch": "1s"}, "slo-ttft-p99.batch: requests of the class batch have no"),
        (
            {"slo-ttft-p99": "2s", "slo-ttft-p99.Gold": "1s"},
            "slo-ttft-p99.Gold is not known: of a class there are carpool",
        ),
        (
            {"slo-ttft-p99": "2s", "slo-p99.gold": "1s"},
            "slo-p99.gold is not known: of a class there are carpool.dev/slo-tt",
        ),
        (
            {"slo-ttft-p99": "2s"} | {f"slo-ttft-p99.c{i}": "1s" for i in range(9)},
            "slo-*.CLASS: Expected `array` of length <= 8, so drop some",
        ),
    ],
)
def test_a_problem_of_a_class_names_the_annotation_and_the_fix(given, problem):
    spec, problems, _ = wish(**given)
    assert spec is None
    assert len(problems) == 1
    assert problems[0].startswith(PREFIX + problem)


@pytest.mark.parametrize("given", [{}, {"inject": "true"}, {"inject": "false", "slo_p99": "50ms"}])
def test_without_an_slo_or_with_inject_false_there_is_no_policy(given):
    assert wish(**given) == Wish(None, ())


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"slo_p99": "50 ms"}, "slo-p99 is '50 ms': write a duration, e.g. 50ms"),
        ({"slo_p99": "50us"}, "slo-p99 is '50us': write a duration, e.g. 50ms"),
        ({"slo_p99": "0s"}, "slo-p99: must be longer than 0s"),
        ({"slo_p99": "50ms", "slo_p50": "60ms"}, "slo-*: p50 (60ms) is longer than p99 (50ms)"),
        ({"slo_p98": "50ms"}, "slo-p98 is not known: did you mean carpool.dev/slo-p9"),
        ({"slo_p99": "50ms", "max_bach": "8"}, "max-bach is not known: did you mean carpool.dev/max-batch?"),
        ({"slo_p99": "50ms", "zzz": "8"}, "zzz is not known: there are carpool.dev/inject, carpool.dev/slo-p50"),
        ({"slo_p99": "50ms", "max_batch": "many"}, "max-batch is 'many': write a whole number from 1 to 65536, in"),
        ({"slo_p99": "50ms", "max_batch": "0"}, "max-batch is '0': write a whole number from 1"),
        ({"slo_p99": "50ms", "max_batch": "70000"}, "max-batch is '70000': write a whole number from 1 to 65536"),
        (
            {"slo_p99": "50ms", "max_in_flight": "65537"},
            "max-in-flight is '65537': write a whole number from 1 to 6",
        ),
        (
            {"slo_p99": "50ms", "target_utilization": "120"},
            "target-utilization is '120': write a whole number from 1 ",
        ),
        (
            {"slo_p99": "50ms", "device_share": "0"},
            "device-share is '0': write a whole number from 1 to 100, in",
        ),
        ({"slo_p99": "50ms", "max_wait": "60ms"}, "max-wait: 60ms is not below the SLO of 50ms: lower it or drop it"),
        ({"slo_p99": "50ms", "mode": "apply"}, "mode is 'apply': did you mean Apply?"),
        ({"slo_p99": "50ms", "mode": "Freeze"}, "mode is 'Freeze': there are Apply, Recommend, Hold"),
        ({"slo_p99": "50ms", "inject": "yes"}, 'inject is \'yes\': write "true" or "false", in quotes'),
        ({"slo_p99": "50ms", "port": "http"}, "port is read in the pod template only: move it to spec.template"),
        ({"max_batch": "8"}, "max-batch belongs to an SLO: add one, e.g. carpool.dev/slo-p99: 50ms, here or on"),
    ],
)
def test_a_problem_names_the_annotation_and_the_fix_and_leaves_no_policy(given, problem):
    spec, problems, _ = wish(**given)
    assert spec is None
    assert len(problems) == 1
    assert problems[0].startswith(PREFIX + problem)


def test_all_problems_are_reported_at_once():
    assert len(wish(slo_p99="50", mode="on", max_batch="x").problems) == 3


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("injct", "injct in the pod template is not known: did you mean carpool.dev/inject?"),
        ("contaner", "contaner in the pod template is not known: did you mean carpool.dev/container?"),
        ("zzz", "zzz in the pod template is not known: there are carpool.dev/inject, carpool.dev/container, "),
        ("slo-tpot-p99.gold", "slo-tpot-p99.gold is read on the workload itself: move it from the pod template"),
        ("slo-p99", "slo-p99 is read on the workload itself: move it from the pod template to metadata.annotations"),
    ],
)
def test_an_annotation_that_nothing_reads_in_a_template_is_reported_with_a_suggestion(key, problem):
    (found,) = misplaced({PREFIX + key: "x", PREFIX + "inject": "true", "app": "y"})
    assert found.startswith(PREFIX + problem)


def test_what_belongs_into_a_template_is_not_misplaced_there():
    written = (
        "inject",
        "container",
        "port",
        "sidecar-cpu",
        "sidecar-cpu-limit",
        "sidecar-memory",
        "sidecar-memory-request",
        "max-body",
        "data-port",
        "admin-port",
        "status",
        "target",
        "skipped",
    )
    assert misplaced({PREFIX + each: "x" for each in written}) == ()


def test_names_are_made_of_the_workload_s():
    assert annotations.change_name("StatefulSet", "bert") == "carpool-statefulset-bert"
    assert annotations.policy_name("Deployment", "bert") == "deployment-bert"


NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
"""What the API server takes for a name, up to 253 characters of it."""


@pytest.mark.parametrize("name", [annotations.change_name, annotations.policy_name])
@pytest.mark.parametrize("rest", ["x", ".x", "--x"])
def test_a_name_that_would_be_too_long_is_shortened_to_one_of_its_own(name, rest):
    longest = [f"a{rest * 200}"[: 253 - taken].rstrip(".-") for taken in range(40)]
    made = [name("Deployment", each) for each in longest]
    assert all(len(each) <= 253 and NAME.fullmatch(each) for each in made)
    assert len(set(made)) == len(set(longest))
    fitting = [each for each in longest if len(name("Deployment", "")) + len(each) <= 253]
    assert fitting
    assert all(name("Deployment", each).endswith(f"deployment-{each}") for each in fitting)
    assert name("Deployment", longest[0]) == name("Deployment", longest[0])


def test_defaults_are_for_workloads_that_ask():
    defaults = {"carpool.dev/slo-p99": "80ms", "carpool.dev/max-batch": "16"}
    asks = {"carpool.dev/inject": "true"}

    assert read("Deployment", "resnet", asks, defaults).by_default
    assert read("Deployment", "resnet", asks, defaults).spec.bounds.max_batch.max == 16
    assert read("Deployment", "resnet", {}, defaults) == Wish(None, ())
    assert read("Deployment", "resnet", {"carpool.dev/inject": "false"}, defaults) == Wish(None, ())
    own = read("Deployment", "resnet", asks | {"carpool.dev/slo-p50": "5ms", "carpool.dev/max-batch": "8"}, defaults)
    assert not own.by_default
    assert (own.spec.slo.due, own.spec.bounds.max_batch.max) == (0.005, 8)


def test_a_default_that_contradicts_the_workload_s_own_is_named():
    defaults = {"carpool.dev/max-wait": "60ms"}

    wish_of = read("Deployment", "resnet", {"carpool.dev/slo-p99": "50ms"}, defaults)

    assert wish_of.problems == ("carpool.dev/max-wait: 60ms is not below the SLO of 50ms: lower it or drop it",)


def test_what_a_namespace_says_of_sidecars_is_the_injector_s():
    for name in annotations.OF_SIDECAR:
        assert read_defaults({name: "7"}) == ({}, ())
    _, (problem,) = read_defaults({"carpool.dev/sidecar-cpus": "1"})
    assert problem == "carpool.dev/sidecar-cpus is no default: did you mean carpool.dev/sidecar-cpu?"


def test_what_a_namespace_may_say():
    good, problems = read_defaults(
        {"carpool.dev/slo-p99": "80ms", "carpool.dev/mode": "on", "carpool.dev/inject": "true", "other": "x"}
    )

    assert good == {"carpool.dev/slo-p99": "80ms"}
    assert len(problems) == 2
    assert problems[0].startswith("carpool.dev/inject is no default: ")


def test_autoscaled_is_true_or_false_and_needs_no_slo():
    assert read("Deployment", "m", {AUTOSCALED: "true"}) == Wish(None, ())
    (problem,) = read("Deployment", "m", {AUTOSCALED: "yes"}).problems
    assert '"true" or "false"' in problem
    assert read("Deployment", "m", {AUTOSCALED: "true", "carpool.dev/slo-p99": "50ms"}).spec is not None


@pytest.mark.parametrize(
    ("name", "most"),
    [("max_batch", 65536), ("max_in_flight", 65536), ("target_utilization", 100), ("device_share", 100)],
)
def test_the_largest_numbers_are_those_of_the_policy(name, most):
    assert wish(slo_p99="50ms", **{name: str(most)}).problems == ()
