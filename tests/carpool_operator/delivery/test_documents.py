from __future__ import annotations

import json
from itertools import pairwise

import pytest
from fleets import EPOCH, RESNET, spec
from msgspec.structs import replace

from carpool.exchange.change import encode, read_change
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.policy.plain import to_plain
from carpool.policy.spec import Fallback, PassThrough, PassThroughMode, Tuning, TuningMode
from carpool_operator.delivery.documents import (
    EVERY,
    FIRST_REPEAT,
    LAST_REPEAT,
    RECLAIM,
    VALID,
    Publisher,
    sidecar_policy,
)
from carpool_operator.tuning.evidence import Seen
from carpool_sidecar.config.settings import parse

PART = sidecar_policy(spec().policy())
ONE, TWO = {EVERY: Parameters()}, {EVERY: Parameters(), "resnet": Parameters(max_batch=8)}


def seen(generation, *, at=100.0):
    return Seen("resnet-0", "one", 0.0, at=at, generation=generation, running=generation)


def published(parameters=None):
    publisher = Publisher(RESNET)
    publisher.publish(0.0, EPOCH, PART, parameters or ONE)
    return publisher


def test_a_generation_is_the_time_in_milliseconds_and_grows_whatever_the_clock_does():
    publisher = published()
    assert publisher.change.generation == EPOCH * 1000
    assert publisher.change.target == str(RESNET)
    assert publisher.change.expires == EPOCH + VALID
    later = publisher.publish(1.0, EPOCH - 3600, PART, TWO)
    assert later.change.generation == EPOCH * 1000 + 1
    publisher.notice(int(EPOCH * 1000) + 77)
    assert publisher.publish(2.0, EPOCH - 3600, PART, ONE).change.generation == EPOCH * 1000 + 78


def test_a_sidecar_gets_the_slo_and_not_how_the_fleet_is_tuned():
    tuned = replace(spec().policy(), tuning=Tuning(tolerance_percent=50), fallback=Fallback(failure_threshold=9))
    assert sidecar_policy(tuned) == PART
    assert sidecar_policy(spec(0.08).policy()) != PART
    change = published(TWO).change
    assert read_change(json.loads(encode(change))) == change


def test_a_baseline_that_is_written_is_in_it_to_be_compared_with():
    policy = spec(baseline=Parameters(max_batch=8)).policy()
    assert sidecar_policy(policy).baseline == policy.baseline


@pytest.mark.parametrize("mode", TuningMode)
@pytest.mark.parametrize("passes", PassThroughMode)
def test_first_calls_go_on_under_an_operator_where_they_do_without_one(mode, passes):
    policy = spec(tuning=Tuning(mode=mode), pass_through=PassThrough(mode=passes)).policy()
    server = {"upstream": {"url": "http://127.0.0.1:9000"}}
    alone = parse(json.dumps({**server, "policy": to_plain(policy)}))
    change = Publisher(RESNET).publish(0.0, EPOCH, sidecar_policy(policy), ONE).change
    steered = {**server, "target": change.target, **to_plain(change)}
    steered = {name: steered[name] for name in ("upstream", "target", "policy", "parameters")}
    # Hold freezes a fleet as it runs; a sidecar by itself has nothing before it. Other modes have no first calls.
    frozen = mode is TuningMode.HOLD and passes is PassThroughMode.AUTOMATIC
    assert parse(json.dumps(steered)).undecided == (32 if frozen else alone.undecided)


def test_what_is_said_already_is_not_said_again():
    publisher = published(TWO)
    assert publisher.says(PART, TWO)
    assert publisher.says(PART, {**TWO, "bert": Parameters()}), "who is not named has what all have"
    assert not publisher.says(PART, {**TWO, "bert": Parameters()}, ["bert"]), "a name says that it was decided"
    assert not publisher.says(PART, {**TWO, "resnet": Parameters(max_batch=9)})
    assert not publisher.says(PART, {EVERY: Parameters(max_wait=Duration(0.001))})
    assert not publisher.says(sidecar_policy(spec(0.08).policy()), TWO)
    assert not Publisher(RESNET).says(PART, TWO)


def test_a_restart_publishes_nothing_by_itself():
    change = published(TWO).change
    after = Publisher(RESNET)
    after.restore(change)
    assert after.says(PART, TWO)
    assert not after.is_due(0.0, EPOCH + 1)
    assert after.publish(1.0, EPOCH - 5, PART, ONE).change.generation > change.generation


def test_it_is_signed_anew_when_half_of_its_time_is_over():
    publisher = published()
    assert not Publisher(RESNET).is_due(0.0, EPOCH)
    assert not publisher.is_due(1.0, EPOCH + VALID / 2 - 1)
    assert publisher.is_due(1.0, EPOCH + VALID / 2)


def test_pods_that_run_something_newer_get_something_newer_but_not_for_ever():
    publisher = published()
    publisher.notice(publisher.change.generation)
    assert not publisher.is_due(1.0, EPOCH)
    publisher.notice(publisher.change.generation + 5000)
    assert publisher.is_due(1.0, EPOCH)
    newer = publisher.publish(1.0, EPOCH, PART, ONE).change.generation
    assert newer == EPOCH * 1000 + 5001
    publisher.notice(newer + 1)
    assert not publisher.is_due(2.0, EPOCH), "two that outbid each other must not do so at every step"
    assert publisher.is_due(1.0 + RECLAIM, EPOCH)


def test_a_trial_is_newer_and_for_a_few():
    publisher = published()
    document = publisher.publish_trial(1.0, EPOCH, PART, TWO, {"b", "a"})
    assert document.pods == ("a", "b")
    assert document.change.generation > publisher.change.generation
    assert publisher.wanted("a", {"a", "b"}) is publisher.trial
    assert publisher.wanted("c", {"a", "b"}) is publisher.change
    assert not publisher.is_due(2.0, EPOCH)
    publisher.publish(2.0, EPOCH, PART, ONE)
    assert publisher.trial is None
    assert publisher.change.generation > document.change.generation


def test_a_pod_that_is_behind_gets_repeats_less_and_less_often():
    publisher = published()
    old = publisher.change.generation - 1
    sent = [now for now in range(2000) if publisher.repeats(float(now), {"a": seen(old, at=float(now))}, ())]
    assert sent[0] == FIRST_REPEAT
    gaps = [after - before for before, after in pairwise(sent)]
    assert gaps[:4] == [20, 40, 80, 160]
    assert set(gaps[5:]) == {LAST_REPEAT}


def test_who_has_it_or_was_not_heard_since_is_left_alone():
    publisher = published()
    publisher.publish(50.0, EPOCH + 50, PART, TWO)
    current = publisher.change.generation
    assert publisher.repeats(100.0, {"a": seen(current), "b": seen(0, at=49.0), "c": seen(current + 1)}, ()) == []
    assert Publisher(RESNET).repeats(100.0, {"a": seen(0)}, ()) == []


def test_canaries_that_are_behind_get_the_configuration_of_canaries():
    publisher = published()
    trial = publisher.publish_trial(0.0, EPOCH, PART, TWO, {"a"})
    known = {"a": seen(publisher.change.generation), "b": seen(1)}
    documents = publisher.repeats(60.0, known, {"a"})
    assert {(document.change.generation, document.pods) for document in documents} == {
        (trial.change.generation, ("a",)),
        (publisher.change.generation, ("b",)),
    }
