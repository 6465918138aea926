from __future__ import annotations

from random import Random

import pytest
from fleets import pod_of

from carpool_operator.tuning.canary import (
    LONGEST,
    LOOKS,
    RETRY,
    Answers,
    CanaryTest,
    Comparison,
    Patience,
    Verdict,
    able,
    choose,
)


def trial(*, min_requests=300):
    return CanaryTest(0.99, min_requests)


def play(one, canaries, others, *, missing, others_missing, seed=1, until=400.0):
    """Answers per interval of 2 s and their miss fractions, until there is a verdict; returns it, and when."""
    rng = Random(seed)

    def answers(count, fraction):
        misses = sum(rng.random() < fraction for _ in range(count))
        return Answers(count - misses, misses)

    now = 0.0
    while now < until:
        now += 2.0
        one.observe(answers(canaries, missing), answers(others, others_missing))
        verdict, message = one.verdict(now)
        if verdict is not Verdict.CONTINUE:
            return verdict, now, message
    return Verdict.CONTINUE, now, ""


def test_good_parameters_are_promoted_as_soon_as_that_is_proven():
    verdict, now, message = play(trial(), 100, 300, missing=0.0, others_missing=0.0)
    assert verdict is Verdict.PROMOTE
    assert now <= 10.0
    assert "0 of 400 requests" in message


def test_bad_parameters_are_rolled_back_at_once():
    verdict, now, message = play(trial(), 100, 300, missing=0.2, others_missing=0.001)
    assert verdict is Verdict.ROLL_BACK
    assert now <= 6.0
    assert "on the other pods" in message


def test_a_riskier_setting_may_miss_more_than_the_others_while_it_meets_the_slo():
    # Ten times as many as the others, but within what the SLO allows: that is what riskier means.
    verdicts = [play(trial(), 200, 600, missing=0.003, others_missing=0.0003, seed=seed)[0] for seed in range(20)]
    assert verdicts.count(Verdict.PROMOTE) >= 19


def test_what_hits_all_pods_is_not_the_canaries_fault():
    verdicts = {play(trial(), 100, 300, missing=0.2, others_missing=0.2, seed=seed)[0] for seed in range(20)}
    assert verdicts == {Verdict.RETURN}


def test_errors_of_both_kinds_are_rare():
    good = [play(trial(), 50, 150, missing=0.004, others_missing=0.004, seed=seed)[0] for seed in range(100)]
    bad = [play(trial(), 50, 150, missing=0.04, others_missing=0.001, seed=seed)[0] for seed in range(100)]
    assert good.count(Verdict.ROLL_BACK) <= 2
    assert bad.count(Verdict.PROMOTE) <= 2
    assert bad.count(Verdict.ROLL_BACK) >= 90


def test_no_sooner_than_so_many_requests():
    _, now, _ = play(trial(min_requests=2000), 100, 300, missing=0.0, others_missing=0.0)
    assert now == 40.0


def test_little_traffic_promotes_in_the_end_where_nothing_speaks_against_it():
    verdict, now, message = play(trial(), 1, 3, missing=0.0, others_missing=0.0)
    assert (verdict, now) == (Verdict.PROMOTE, LONGEST)
    assert "no result against" in message


def test_little_traffic_that_misses_returns():
    one = trial()
    one.observe(Answers(40, 2), Answers(100, 0))
    assert one.verdict(LONGEST)[0] is Verdict.RETURN


def test_without_others_to_compare_with_the_slo_alone_decides():
    one = trial()
    for _ in range(5):
        one.observe(Answers(60, 40), None)
    assert one.verdict(10.0)[0] is Verdict.ROLL_BACK


def test_canaries_that_never_run_it_prove_nothing():
    one = trial()
    for _ in range(LOOKS):
        one.observe(None, Answers(100, 0))
    assert one.verdict(LONGEST - 1)[0] is Verdict.CONTINUE
    assert one.verdict(LONGEST)[0] is Verdict.RETURN


def test_an_operator_that_seldom_looks_does_not_take_that_for_silence():
    one = trial()
    for _ in range(LOOKS - 1):
        one.observe(None, Answers(100, 0))
        assert one.verdict(2 * LONGEST)[0] is Verdict.CONTINUE
    one.observe(None, Answers(100, 0))
    verdict, message = one.verdict(3 * LONGEST)
    assert verdict is Verdict.RETURN
    assert "360 s" in message


def test_the_comparison_is_of_rates_not_of_counts():
    equal = Comparison()
    for _ in range(1000):
        equal.observe(100, 2, 900, 18)
    assert equal.evidence < 1.0
    worse = Comparison()
    worse.observe(100, 4, 900, 0)
    assert worse.evidence > 2.0
    nobody = Comparison()
    nobody.observe(100, 50, 0, 0)
    assert nobody.evidence == 0.0


@pytest.mark.parametrize(
    ("pods", "percent", "canaries"), [(1, 10, 0), (2, 10, 1), (2, 50, 1), (10, 10, 1), (11, 10, 2), (40, 50, 20)]
)
def test_how_many_are_canaries(pods, percent, canaries):
    assert len(choose(able([pod_of(index) for index in range(pods)], "one"), percent)) == canaries


def test_who_may_be_a_canary():
    pods = [pod_of(0, ready=False), pod_of(1, deleting=True), pod_of(2, template_hash="old"), pod_of(3), pod_of(4)]
    assert choose(able(pods, "one"), 50) == ["resnet-uid-3"]
    assert choose(able(pods[:4], "one"), 50) == []


def test_patience_grows_with_every_trial_that_came_to_nothing():
    patience = Patience()
    assert patience.over(0.0)
    patience.failed(0.0)
    assert not patience.over(RETRY - 1)
    assert patience.over(RETRY)
    patience.failed(RETRY)
    assert not patience.over(2.5 * RETRY)
    assert patience.over(3 * RETRY)
    patience.succeeded()
    patience.failed(1000.0)
    assert patience.over(1000.0 + RETRY)
