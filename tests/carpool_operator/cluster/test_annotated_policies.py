from __future__ import annotations

from msgspec.structs import replace
from things import DEPLOYMENT, POLICY, as_kept, deployment, policy

from carpool_operator.api.model import Namespace
from carpool_operator.cluster.annotated_policies import AnnotatedPolicies, drop, keep
from carpool_operator.cluster.cache import Cache
from carpool_operator.cluster.kinds import KINDS, POLICIES
from carpool_operator.cluster.objects import RawPolicy
from carpool_operator.workloads.metadata import Key
from carpool_operator.workloads.registry import BY_NAME
from carpool_operator.workloads.registry import DEFAULT as DEPLOYMENTS

OWNER = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "web", "uid": "uid-web", "controller": True}
ANNOTATED = {"labels": {"carpool.dev/annotated": "true"}, "ownerReferences": [OWNER]}


def workload(**annotations):
    named = {f"carpool.dev/{key.replace('_', '-')}": value for key, value in annotations.items()}
    return as_kept(DEPLOYMENTS, deployment(annotations=named))


def policies(*bodies):
    cache = Cache()
    for body in bodies:
        kept = as_kept(RawPolicy, body)
        cache.put(Key(kept.namespace, kept.name), 1, kept)
    return cache


def test_an_annotation_asks_for_a_policy():
    plan = AnnotatedPolicies().plan([workload(slo_p99="50ms"), as_kept(DEPLOYMENTS, deployment("plain"))], policies())

    ((wanted, spec),) = plan.keep
    assert wanted.target.name == "web"
    assert float(spec.slo.latency.p99) == 0.05
    assert (plan.drop, plan.events) == ([], [])


def test_what_is_as_wanted_is_left_alone():
    there = policies(policy("deployment-web", **ANNOTATED))

    assert AnnotatedPolicies().plan([workload(slo_p99="50ms")], there) == ([], [], [])
    ((_, spec),) = AnnotatedPolicies().plan([workload(slo_p99="80ms")], there).keep
    assert float(spec.slo.latency.p99) == 0.08


def test_what_a_mutating_policy_alters_is_not_written_again_and_again():
    asked = [workload(slo_p99="80ms")]
    there = policies(policy("deployment-web", **ANNOTATED))  # with 50 ms, whatever was asked for
    owned = AnnotatedPolicies()
    (wish,) = owned.plan(asked, there).keep
    (kept,) = there
    owned.kept(wish, kept)
    plan = owned.plan(asked, there)
    assert plan.keep == []
    ((_, told),) = plan.events
    assert told.reason == "PolicyAltered"
    # Another wish is written, and so is the same after somebody else changed the policy.
    assert owned.plan([workload(slo_p99="90ms")], there).keep
    other = policy("deployment-web", **ANNOTATED)
    other["spec"]["slo"]["latency"]["p99"] = "70ms"
    assert owned.plan(asked, policies(other)).keep
    # And once it comes through, all is well.
    owned.kept(wish, replace(kept, spec=wish.spec))
    assert owned.plan(asked, there).keep


def test_one_that_nobody_asks_for_any_more_goes():
    there = policies(policy("deployment-web", **ANNOTATED), policy("by-hand", "web"))

    for workloads in ([workload()], [workload(inject="true")], [workload(slo_p99="50ms", inject="false")], []):
        plan = AnnotatedPolicies().plan(workloads, there)
        assert [each.name for each in plan.drop] == ["deployment-web"]
        assert plan.keep == []


def test_a_policy_stays_while_its_workload_s_kind_can_not_be_listed():
    """An unlisted workload may exist. If it does not, the API server deletes the policy that it owned."""
    there = policies(policy("deployment-web", **ANNOTATED))

    for listed in (set(), {("StatefulSet", "ns")}, {("Deployment", "b")}):
        plan = AnnotatedPolicies().plan([], there, lists=lambda *which, listed=listed: which in listed)
        assert plan == ([], [], [])
    plan = AnnotatedPolicies().plan([], there, lists=lambda *which: which == ("Deployment", "ns"))
    assert [each.name for each in plan.drop] == ["deployment-web"]


def test_a_typo_in_the_pod_template_is_reported_and_the_policy_stays():
    body = deployment(annotations={"carpool.dev/slo-p99": "50ms"}, inject=None)
    body["spec"]["template"]["metadata"]["annotations"] = {"carpool.dev/contaner": "model"}
    owned = AnnotatedPolicies()

    for _ in range(2):
        plan = owned.plan([as_kept(DEPLOYMENTS, body)], policies())
        ((_, event),) = plan.events
        assert (event.warning, event.reason) == (True, "TemplateAnnotationUnknown")
        assert "did you mean carpool.dev/container?" in event.message
        assert len(plan.keep) == 1

    body["metadata"]["annotations"] = {}
    assert len(owned.plan([as_kept(DEPLOYMENTS, body)], policies()).events) == 1
    body["spec"]["template"]["metadata"]["annotations"] = {"carpool.dev/container": "model"}
    assert owned.plan([as_kept(DEPLOYMENTS, body)], policies()).events == []


def test_what_kserve_hands_on_to_its_pods_is_where_it_belongs():
    kind = BY_NAME["InferenceService"]
    body = {"metadata": {"name": "bert", "namespace": "ns", "uid": "u", "creationTimestamp": "2026-11-21T12:00:00Z"}}
    body |= {"spec": {"predictor": {"annotations": {"carpool.dev/port": "http"}}}}
    body["metadata"]["annotations"] = {"carpool.dev/slo-p99": "50ms"}
    plan = AnnotatedPolicies().plan([as_kept(kind, body)], policies())
    assert (len(plan.keep), plan.events) == (1, [])

    body["spec"]["predictor"]["annotations"]["carpool.dev/slo-p99"] = "80ms"
    body["metadata"]["annotations"]["carpool.dev/capture"] = "true"
    told = [event.message for _, event in AnnotatedPolicies().plan([as_kept(kind, body)], policies()).events]
    assert [message.partition(":")[0] for message in told] == [
        "carpool.dev/capture is read in the pod template only",
        "carpool.dev/slo-p99 is read on the workload itself",
    ]
    assert told[0].endswith("move it to spec.predictor.annotations")


def test_a_typo_is_reported_and_removes_nothing():
    owned = AnnotatedPolicies()
    there = policies(policy("deployment-web", **ANNOTATED))

    plan = owned.plan([workload(slo_p99="50")], there)

    assert (plan.keep, plan.drop) == ([], [])
    ((about, event),) = plan.events
    assert about.target.name == "web"
    assert event.warning
    assert "slo-p99 is '50'" in event.message
    assert owned.plan([workload(slo_p99="50")], policies()).keep == []


def test_a_policy_of_that_name_by_hand_is_not_touched():
    plan = AnnotatedPolicies().plan([workload(slo_p99="50ms")], policies(policy("deployment-web", "something-else")))

    assert (plan.keep, plan.drop) == ([], [])
    ((_, event),) = plan.events
    assert event.reason == "PolicyNameTaken"


def test_a_copy_of_one_is_its_maker_s_own():
    """As `kubectl get -o yaml` writes it, under another name or without its owner: with the label, all the same."""
    label = {"labels": ANNOTATED["labels"]}
    there = policies(policy("deployment-web", **ANNOTATED), policy("mine", **ANNOTATED), policy("bare", **label))

    assert AnnotatedPolicies().plan([workload(slo_p99="50ms")], there) == ([], [], [])
    assert [each.name for each in AnnotatedPolicies().plan([], there).drop] == ["deployment-web"]


LABEL = {"labels": ANNOTATED["labels"]}


def test_one_that_lost_its_owner_follows_the_annotations_again():
    """``kubectl delete --cascade=orphan`` and a new workload of that name: the usual way to change immutable fields."""
    there = policies(policy("deployment-web", **LABEL))

    for p99 in ("50ms", "80ms"):
        plan = AnnotatedPolicies().plan([workload(slo_p99=p99)], there)
        assert [str(each.spec.slo.latency.p99) for each in plan.keep] == [p99]
        assert (plan.drop, plan.events) == ([], [])
    for workloads in ([workload()], []):
        assert [each.name for each in AnnotatedPolicies().plan(workloads, there).drop] == ["deployment-web"]


def test_one_whose_owner_is_taken_away_at_every_write_is_not_written_again_and_again():
    asked, (there,) = [workload(slo_p99="50ms")], policies(policy("deployment-web", **LABEL))
    owned = AnnotatedPolicies()
    (wish,) = owned.plan(asked, policies(policy("deployment-web", **LABEL))).keep
    owned.kept(wish, there)

    plan = owned.plan(asked, policies(policy("deployment-web", **LABEL)))

    assert plan.keep == []
    assert [event.reason for _, event in plan.events] == ["PolicyAltered"]


async def test_the_owner_that_was_lost_is_written_again(api, writer):
    wanted = as_kept(DEPLOYMENTS, api.put(*DEPLOYMENT, deployment(annotations={"carpool.dev/slo-p99": "50ms"})))
    orphan = as_kept(RawPolicy, api.put(*POLICY, policy("deployment-web", **LABEL)))
    cache = Cache()
    cache.put(Key("ns", "deployment-web"), 1, orphan)
    (wish,) = AnnotatedPolicies().plan([wanted], cache).keep

    answer = KINDS[POLICIES].kept.one.decode(await keep(writer, wish)).policy()

    assert answer.uid == orphan.uid
    assert (orphan.orphaned, answer.orphaned) == (True, False)
    (owner,) = api.get(*POLICY, "deployment-web")["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == (wanted.uid, True)


async def test_what_is_written_is_what_was_wanted_and_owned(api, writer):
    body = api.put(*DEPLOYMENT, deployment(annotations={"carpool.dev/slo-p99": "50ms", "carpool.dev/max-batch": "32"}))
    wanted = as_kept(DEPLOYMENTS, body)
    (wish,) = AnnotatedPolicies().plan([wanted], policies()).keep

    answer = KINDS[POLICIES].kept.one.decode(await keep(writer, wish))
    again = await keep(writer, wish)

    there = api.get(*POLICY, "deployment-web")
    assert there["metadata"]["ownerReferences"] == [
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "name": "web",
            "uid": body["metadata"]["uid"],
            "controller": True,
        }
    ]
    assert answer.policy().annotated
    assert answer.policy().spec == wish.spec
    assert KINDS[POLICIES].kept.one.decode(again).metadata == answer.metadata
    cache = Cache()
    cache.put(Key("ns", "deployment-web"), 1, answer.policy())
    assert AnnotatedPolicies().plan([wanted], cache) == ([], [], [])


async def test_a_policy_that_is_another_by_now_is_not_deleted(api, writer):
    body = api.put(*POLICY, policy("deployment-web", **ANNOTATED))
    old = as_kept(RawPolicy, body, uid="of the one before")

    await drop(writer, old)
    assert api.get(*POLICY, "deployment-web") is not None
    await drop(writer, as_kept(RawPolicy, body))
    assert api.get(*POLICY, "deployment-web") is None
    await drop(writer, as_kept(RawPolicy, body))  # gone already


def of(**defaults):
    named = {f"carpool.dev/{name.replace('_', '-')}": value for name, value in defaults.items()}
    return Namespace("ns", "uid-ns", named, ())


def test_the_defaults_of_a_namespace_are_for_those_that_ask():
    asks, plain, own = workload(inject="true"), workload(), workload(inject="true", slo_p50="10ms")
    defaults = [of(slo_p99="80ms", objective="Latency")]

    ((_, spec),) = AnnotatedPolicies().plan([asks], policies(), defaults).keep
    assert (spec.slo.latency.p99, spec.objective) == (0.08, "Latency")
    assert AnnotatedPolicies().plan([plain], policies(), defaults) == ([], [], [])
    ((_, spec),) = AnnotatedPolicies().plan([own], policies(), defaults).keep
    assert (spec.slo.latency.p50, spec.slo.latency.p99, spec.objective) == (0.01, None, "Latency")


def test_a_namespace_s_defaults_take_precedence_over_the_cluster_s():
    owned = AnnotatedPolicies({"carpool.dev/slo-p50": "10ms", "carpool.dev/max-batch": "8"})

    ((_, spec),) = owned.plan([workload(inject="true")], policies(), [of(slo_p99="80ms")]).keep
    assert (spec.slo.latency.p50, spec.slo.latency.p99, spec.bounds.max_batch.max) == (None, 0.08, 8)
    ((_, spec),) = owned.plan([workload(inject="true")], policies(), []).keep
    assert (spec.slo.latency.p50, spec.slo.latency.p99) == (0.01, None)


def test_a_default_makes_no_policy_where_a_person_wrote_one():
    asks, own = workload(inject="true"), workload(slo_p99="50ms")
    by_hand, defaults = {asks.target}, [of(slo_p99="80ms")]

    assert AnnotatedPolicies().plan([asks], policies(), defaults, by_hand).keep == []
    assert len(AnnotatedPolicies().plan([own], policies(), defaults, by_hand).keep) == 1, (
        "the operator says that it is in conflict"
    )
    plan = AnnotatedPolicies().plan([asks], policies(policy("deployment-web", **ANNOTATED)), defaults, by_hand)
    assert [each.name for each in plan.drop] == ["deployment-web"]


def test_a_default_that_makes_no_sense_is_said_where_it_would_count():
    wrong = Namespace("ns", "uid-ns", {}, ("carpool.dev/mode is 'on': there are Apply, Recommend, Hold",))

    ((about, event),) = AnnotatedPolicies().plan([workload(inject="true"), workload()], policies(), [wrong]).events

    assert about.target.name == "web"
    assert (event.reason, event.message[:17]) == ("DefaultInvalid", "of the namespace:")
