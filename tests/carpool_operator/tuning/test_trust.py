from __future__ import annotations

from math import inf

from fleets import spec

from carpool.policy.spec import Fallback
from carpool_operator.tuning.evidence import Gathered, Sample
from carpool_operator.tuning.trust import Trust, Turn

SPEC = spec()


def gathered(failing=0, *, expected=3, fresh=True, samples=2, stalled=0):
    each = [Sample(str(index), 7, 2.0, index < stalled, {}, {}, 0) for index in range(samples)]
    return Gathered(each, {f"pod-{index}": "timed out" for index in range(failing)}, expected, fresh, [], [])


def test_evidence_that_is_there():
    trust = Trust()
    assert trust.take(2.0, SPEC, gathered(), 2.0) is Turn.SEEING
    assert trust.blind is None
    assert trust.good_at == 2.0
    assert trust.take(4.0, SPEC, gathered(failing=1), 4.0) is Turn.SEEING, "two of three"


def test_no_pods_and_no_new_samples_are_no_failures():
    trust = Trust()
    assert trust.take(2.0, SPEC, gathered(expected=0, samples=0), -inf) is Turn.BLIND
    assert trust.blind.reason == "NoPodsReady"
    for now in range(4, 1000, 2):
        assert trust.take(float(now), SPEC, gathered(expected=0, samples=0), -inf) is Turn.BLIND
    trust.take(1000.0, SPEC, gathered(), 1000.0)
    assert trust.take(1002.0, SPEC, gathered(fresh=False), 1000.0) is Turn.BLIND
    assert trust.blind is None


def lost_at(trust, wanted, *, fresh=True):
    trust.take(0.0, wanted, gathered(), 0.0)
    for now in range(2, 400, 2):
        if trust.take(float(now), wanted, gathered(failing=2, fresh=fresh), 0.0) is Turn.LOST:
            return now
    return None


def test_it_is_lost_when_it_is_stale_and_failed_so_often():
    assert lost_at(Trust(), SPEC) == 32
    assert lost_at(Trust(), SPEC, fresh=False) == 36, "silence counts once it is stale"
    assert lost_at(Trust(), spec(fallback=Fallback(failure_threshold=50))) == 100


def test_loss_and_recovery_are_said_once():
    trust = Trust()
    assert lost_at(trust, SPEC) == 32
    assert trust.take(34.0, SPEC, gathered(failing=3), 0.0) is Turn.BLIND
    assert "pod-0: timed out" in trust.blind.message
    assert trust.take(36.0, SPEC, gathered(samples=0), 36.0) is Turn.SEEING, "the first reading has nothing to compare"
    assert trust.take(38.0, SPEC, gathered(), 38.0) is Turn.RECOVERED
    assert trust.take(40.0, SPEC, gathered(), 40.0) is Turn.SEEING
    trust.take(42.0, SPEC, gathered(failing=3), 40.0)
    assert trust.take(44.0, SPEC, gathered(), 44.0) is Turn.SEEING


def test_hosts_that_paused():
    trust = Trust()
    trust.take(2.0, SPEC, gathered(), 2.0)
    assert trust.take(4.0, SPEC, gathered(stalled=1), 4.0) is Turn.SEEING
    assert trust.take(6.0, SPEC, gathered(stalled=2), 6.0) is Turn.BLIND
    assert trust.blind.reason == "HostStalled"
    assert trust.good_at == 4.0
