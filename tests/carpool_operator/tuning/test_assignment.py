from __future__ import annotations

from itertools import permutations

from fleets import RESNET, policy_of, spec

from carpool_operator.api.model import Target
from carpool_operator.tuning.assignment import assign, conflicts, targets_of

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


def test_a_policy_that_cannot_be_read_claims_nothing():
    broken = policy_of(name="broken", created=0.0).__class__(
        **{**{name: getattr(policy_of(), name) for name in policy_of().__struct_fields__}, "spec": None, "error": "?"}
    )
    assert assign([broken]) == {}


def test_the_loser_is_told_who_won_and_why():
    winner = policy_of(name="winner", created=1.0)
    loser = policy_of(spec(names=("resnet", "bert")), name="loser", created=2.0)
    owners = assign([winner, loser])
    assert owners[BERT].name == "loser", "the rest stays its own"
    told = conflicts(loser, [RESNET, BERT], owners)
    assert "Deployment resnet belongs to BatchingPolicy winner, which is older" in told
    assert "targetRefs" in told
    assert "bert" not in told
    assert conflicts(winner, [RESNET], owners) == ""


def test_what_is_made_of_annotations_is_told_so():
    explicit, made = policy_of(name="explicit", created=2.0), policy_of(name="made", created=1.0, annotated=True)
    told = conflicts(made, [RESNET], assign([explicit, made]))
    assert "made from annotations" in told
    assert "take the annotations carpool.dev/slo-* off the workload" in told


def test_of_two_as_old_the_first_by_name():
    one, two = policy_of(name="one"), policy_of(name="two")
    assert "comes first by name" in conflicts(two, [RESNET], assign([one, two]))
