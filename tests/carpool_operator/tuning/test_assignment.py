from __future__ import annotations

from itertools import permutations

from fleets import RESNET, policy_of, spec, workload_of
from msgspec.structs import replace

from carpool.policy.durations import Duration
from carpool.policy.spec import SLO, Latency
from carpool_operator.api.annotations import INJECT, STATUS
from carpool_operator.api.model import Target
from carpool_operator.api.spec import MAX_SELECTED, LabelOperator, LabelRequirement, PolicySpec, TargetSelector
from carpool_operator.tuning.assignment import assign, conflicts, select, targets_of

BERT = Target("vision", "Deployment", "bert")


def test_a_policy_has_what_it_names_in_its_own_namespace():
    assert targets_of("vision", spec(names=("resnet", "bert"))) == [RESNET, BERT]
    assert assign([policy_of()])[RESNET].name == "resnet"


def test_who_wins_whatever_the_order():
    annotated = policy_of(name="a-annotated", created=1.0, annotated=True)
    older, younger = policy_of(name="z-older", created=2.0), policy_of(name="b-younger", created=3.0)
    same = policy_of(name="zz-same-age", created=2.0)
    for order in permutations([annotated, older, younger, same]):
        assert assign(order)[RESNET].name == "z-older"
    assert assign([younger, annotated])[RESNET].name == "b-younger", "written by hand beats made of annotations"


ALL = TargetSelector(match_labels={"team": "vision"})


def selecting(selector=ALL, **changes):
    wanted = PolicySpec(slo=SLO(latency=Latency(p99=Duration(0.05))), target_selector=selector).validate()
    return policy_of(wanted, **changes)


def labelled(name, namespace="vision", kind="Deployment", **labels):
    return workload_of(Target(namespace, kind, name), labels=labels)


def test_a_selector_has_what_has_the_labels_in_its_own_namespace():
    workloads = [
        labelled("b", team="vision"),
        labelled("a", team="vision", tier="x"),
        labelled("c", team="text"),
        labelled("d", kind="StatefulSet", team="vision"),
        labelled("e", namespace="other", team="vision"),
    ]
    narrow = TargetSelector(
        match_labels={"team": "vision"},
        match_expressions=(LabelRequirement(key="tier", operator=LabelOperator.DOES_NOT_EXIST),),
    )

    found = select([selecting(name="wide"), selecting(narrow, name="narrow"), policy_of()], workloads)

    assert {uid: [each.name for each in of] for uid, of in found.items()} == {
        "uid-wide": ["a", "b"],
        "uid-narrow": ["b"],
    }


def test_the_more_specific_policy_wins_whatever_the_order():
    named, selected = policy_of(name="named", created=9.0), selecting(name="selected", created=1.0)
    annotated = policy_of(name="annotated", created=5.0, annotated=True)
    chosen = select([selected], [labelled("resnet", team="vision"), labelled("bert", team="vision")])
    for order in permutations([named, annotated, selected]):
        assert assign(order, chosen)[RESNET].name == "named"
        assert assign(order, chosen)[BERT].name == "selected"
    assert assign([annotated, selected], chosen)[RESNET].name == "annotated"


def test_a_selector_that_leaves_named_ones_to_others_is_in_no_conflict():
    selected, named = selecting(name="selected"), policy_of(name="named")
    twin = selecting(name="twin", created=selected.created + 1)
    chosen = select([selected, twin], [labelled("resnet", team="vision"), labelled("bert", team="vision")])
    owners = assign([selected, named, twin], chosen)

    assert conflicts(selected, targets_of("vision", selected.spec, chosen[selected.uid]), owners) == ""
    told = conflicts(twin, targets_of("vision", twin.spec, chosen[twin.uid]), owners)
    assert told.startswith("Deployment bert belongs to BatchingPolicy selected, which is older")
    assert "resnet" not in told


def test_a_selector_takes_no_more_than_a_status_can_hold():
    many = [labelled(f"m{number:03}", team="vision") for number in range(MAX_SELECTED + 5)]
    policy = selecting()
    chosen = select([policy], many)

    assert len(chosen[policy.uid]) == MAX_SELECTED + 1
    assert len(targets_of("vision", policy.spec, chosen[policy.uid])) == MAX_SELECTED


def test_a_policy_that_cannot_be_read_claims_nothing():
    broken = policy_of(name="broken", created=0.0).__class__(
        **{**{name: getattr(policy_of(), name) for name in policy_of().__struct_fields__}, "spec": None, "error": "?"}
    )
    assert assign([broken]) == {}


def test_the_message_to_the_policy_that_loses_names_the_winner_and_the_reason():
    winner = policy_of(name="winner", created=1.0)
    loser = policy_of(spec(names=("resnet", "bert")), name="loser", created=2.0)
    owners = assign([winner, loser])
    assert owners[BERT].name == "loser", "the rest stays its own"
    told = conflicts(loser, [RESNET, BERT], owners)
    assert "Deployment resnet belongs to BatchingPolicy winner, which is older" in told
    assert "targetRefs" in told
    assert "bert" not in told
    assert conflicts(winner, [RESNET], owners) == ""


def test_the_message_to_a_policy_made_from_annotations_says_so():
    explicit, made = policy_of(name="explicit", created=2.0), policy_of(name="made", created=1.0, annotated=True)
    told = conflicts(made, [RESNET], assign([explicit, made]))
    assert "made from annotations" in told
    assert "take the annotations carpool.dev/slo-* off the workload" in told


def test_of_two_as_old_the_first_by_name():
    one, two = policy_of(name="one"), policy_of(name="two")
    assert "comes first by name" in conflicts(two, [RESNET], assign([one, two]))


def test_a_selector_leaves_out_what_opted_out_and_a_name_does_not():
    out = labelled("a", team="vision")
    forbids = {INJECT: "false"}
    workloads = [
        replace(out, annotations=forbids),
        replace(labelled("b", team="vision"), template_annotations=forbids),
        labelled("c", team="vision"),
        replace(labelled("d", team="vision"), annotations=forbids, template_annotations={STATUS: "{}"}),
    ]
    found = select([selecting()], workloads)
    assert [each.name for each in found["uid-resnet"]] == ["c", "d"], "d has a sidecar that carpool inject wrote"
    assert targets_of("vision", spec(names=("a",))) == [out.target]
    # Until their last pod with a sidecar is gone, they carry traffic: nothing of theirs changes.
    found = select([selecting()], workloads, [out.target])
    assert [each.name for each in found["uid-resnet"]] == ["a", "c", "d"]
