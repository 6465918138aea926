"""What is explored, when, at what cost; and what becomes of it."""

from __future__ import annotations

from random import Random

import pytest
from examples import CURVE, LIMITS
from msgspec.structs import replace

from carpool.batching.counters import ModelStats
from carpool.exchange.decision import Reason, State
from carpool.forecasting.forecaster import Forecaster, Situation
from carpool.learning.arrivals import Gamma, Poisson, until
from carpool.learning.latency_model import ServiceTime
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.policy.spec import SLO, BatchingPolicy, Bounds, IntRange, Latency, Objective, PassThroughMode
from carpool.simulation.simulator import Device
from carpool.tuning.exploration import (
    BATCHES,
    LASTS,
    LEAST_CREDIT,
    RISE,
    SAVED,
    SPENDS,
    TAKES,
    Exploration,
    batches_needed,
    below,
    optimistic,
    to_measure,
)
from carpool.tuning.objective import Aim, choose
from carpool_cli.planning.assumptions import for_p99
from carpool_cli.planning.twin import flips, tuned

TILES = (0.0063, 0.0063, 0.0072, 0.0091, 0.0111, 0.0134, 0.0157, 0.018, 0.0232)
"""Rows that cost more and more until the first tile, of 32, is full: nine rows are dearer than five."""

KNOWN = replace(ServiceTime.measured(dict(enumerate(TILES, 1))), largest_in_flight=8)

LIMITED = BatchingPolicy(
    objective=Objective.EFFICIENCY,
    slo=SLO(latency=Latency(p99=Duration(0.12))),
    bounds=Bounds(max_in_flight=IntRange(max=1)),
).validate()

TILED = Device(times=lambda rows, _: TILES[rows - 1] if rows <= 9 else 0.0285 * -(-rows // 32), cv=0.02)


def situation(rate, service=KNOWN, target=0.12, most_in_flight=1):
    limits = replace(LIMITED.limits(None), max_in_flight=most_in_flight)
    return Situation(process=Poisson(rate), service=service, target=target, budget=0.005, limits=limits)


def candidate(rate, *, moving, service=KNOWN, target=0.12, spare=0.0, most_in_flight=1, exploration=None):
    """What is worth exploring at a load, from the setting that is best for it."""
    forecaster = Forecaster(situation(rate, service, target, most_in_flight))
    best = choose(forecaster, Aim(), Parameters(), PassThroughMode.NEVER).efficient
    current = forecaster.assess(best.parameters)
    exploration = exploration or Exploration()
    exploration.spare = spare
    exploration.look(forecaster, best, current, moving=moving, now=0.0)
    return exploration.candidate


def seen(rows, batches):
    return ModelStats(cells=[(0, rows, 1, 0, batches, 0.03 * batches, 0.0009 * batches)])


def point(size, flights=1):
    return Parameters(max_batch=size, max_wait=Duration(0.02), max_in_flight=flights)


def begun(size=18, flights=1, now=0.0, service=KNOWN):
    exploration = Exploration()
    exploration.begin(point(size, flights), point(8), service, now)
    return exploration


def observe(exploration, now, stats, service=KNOWN, late=0.0):
    return exploration.observe(now, stats, late, service)


def pause(exploration, size, flights=1):
    """Until when a setting is not explored."""
    return exploration._pauses.get((size, flights), (0.0, 0.0))[0]


def test_what_is_measured_below_an_explored_size_is_known_until_it_ends():
    exploration = begun(18)
    assert exploration.measured == 9
    assert begun(8, flights=16).measured is None, "more in flight shows the server concurrency, and no size"
    observe(exploration, 0.5, seen(12, BATCHES))
    assert exploration.measured is None


def test_more_in_flight_is_shown_by_nothing_else_though_as_many_are_in_force_already():
    # Seven may be in flight, six ever were. Batches of a size that is known well show nothing new.
    service = replace(KNOWN, executors=6, largest_in_flight=6)
    exploration = Exploration()
    exploration.begin(point(8, 7), point(8, 7), service, 0.0)
    assert exploration.measured is None
    assert not observe(exploration, 0.5, seen(8, 100), service)
    assert observe(exploration, 1.0, seen(8, 100), replace(service, executors=7, largest_in_flight=7))
    # A size that is not known well is explored with as many in flight as are in force.
    exploration.begin(point(18, 7), point(8, 7), service, 2.0)
    assert exploration.measured == 9


def test_beyond_what_was_refuted_no_more_is_assumed_to_be_computed_at_once():
    # Eight were in flight, and four were computed at once: batches of two come about with four in flight.
    one = replace(ServiceTime.measured({1: 0.033}, executors=4), largest_in_flight=8)
    forecaster = Forecaster(situation(90.0, one, target=0.0435, most_in_flight=8))
    best = forecaster.assess(Parameters(1, Duration(0.0), 8))
    exploration = Exploration()
    exploration.look(forecaster, best, best, moving=True, now=0.0)
    assert exploration.candidate is not None
    assert exploration.candidate.max_in_flight == 4
    assert exploration.candidate.max_batch == 2


# -- the optimistic curve


def test_a_size_never_measured_may_take_no_longer_than_the_next_smaller_one():
    best_case = optimistic(KNOWN, 16)
    assert best_case.time(16) == pytest.approx(TILES[8])
    assert best_case.time(12) == pytest.approx(TILES[8])
    for rows, seconds in enumerate(TILES, 1):
        assert best_case.time(rows) == pytest.approx(seconds), "sizes that were measured are as they are"


def test_it_never_falls():
    falling = replace(KNOWN, counts=(*[9.0] * 8, 1.0), lowers=(*KNOWN.means[:-1], 0.001))
    best_case = optimistic(falling, 16)
    times = [best_case.time(rows) for rows in range(1, 17)]
    assert times == sorted(times)


def test_a_size_measured_a_few_times_may_take_what_its_lower_confidence_says():
    few = replace(KNOWN, counts=(*[9.0] * 8, BATCHES - 1.0), lowers=(*KNOWN.means[:-1], 0.020))
    assert optimistic(few, 16).time(12) == pytest.approx(0.020)
    assert optimistic(replace(few, counts=(9.0,) * 9), 16).time(9) == pytest.approx(TILES[8])


def test_each_length_has_an_optimistic_curve_of_its_own():
    slower = KNOWN.scaled(3.0)
    best_case = optimistic(replace(KNOWN, mix=((0.8, KNOWN), (0.2, slower))), 16)
    assert [share for share, _ in best_case.mix] == [0.8, 0.2]
    assert best_case.mix[1][1].time(16) == pytest.approx(3 * TILES[8])


def test_batches_show_something_of_a_size_where_they_are_larger_than_what_was_well_measured():
    assert below(KNOWN, 18) == 9
    gaps = ServiceTime.measured({1: 0.002, 4: 0.005, 16: 0.018})
    assert below(gaps, 8) == 4
    assert below(gaps, 32) == 16


# -- what is worth exploring


def test_on_the_way_to_another_setting_a_size_that_the_load_fills_is_explored():
    found = candidate(230, moving=True)
    assert found is not None
    assert (found.max_batch, found.max_wait) == (16, 0.06)


def test_at_rest_and_with_headroom_nothing_is():
    assert candidate(230, moving=False) is None


def test_a_size_that_the_load_would_not_fill_is_not():
    assert candidate(20, moving=True) is None


def test_without_headroom_one_may_be_explored_at_rest():
    seconds = {1: 0.00195, 2: 0.00271, 4: 0.00453, 8: 0.00909, 16: 0.0179, 32: 0.03663}
    found = candidate(800, moving=False, service=ServiceTime.measured(seconds), target=0.1)
    assert found is not None
    assert found.max_batch not in seconds
    full = ServiceTime.measured(seconds | {3: 0.0036, 6: 0.0068, 12: 0.0134, 24: 0.0269, 48: 0.055, 64: 0.0733})
    assert candidate(800, moving=False, service=full, target=0.1) is None


def test_a_size_that_noise_hides_for_longer_than_exploration_lasts_is_not():
    # Of batches that spread by twice their mean it takes 1,114; some 230 come in ten seconds.
    assert candidate(230, moving=True, service=replace(KNOWN, noise=0.5)) is not None
    assert candidate(230, moving=True, service=replace(KNOWN, noise=2.0)) is None


def test_of_several_lengths_each_may_be_as_quick_in_larger_batches():
    mixed = replace(KNOWN, mix=((0.8, KNOWN), (0.2, KNOWN)))
    found = candidate(230, moving=True, service=mixed)
    assert found is not None
    assert found.max_batch > 9


@pytest.mark.parametrize("seed", range(1, 4))
def test_while_the_load_itself_shows_what_batches_take_nothing_is(seed):
    # 270 ms a request and an SLO of 900: by six arrivals and what single requests take, the SLO looks out of reach.
    device, arrivals = Device(times=lambda rows, _: 0.25 + 0.02 * rows, cv=0.1), until(Poisson(3.6), 15.0, Random(seed))
    policy = for_p99(0.9, Objective.EFFICIENCY)
    outcome, decisions = tuned(arrivals, device, policy, seconds=15.0)
    changes = [decision for decision in decisions if decision.change]
    first_pair = next(time for time, rows in zip(outcome.batch_dispatched, outcome.batch_rows, strict=True) if rows > 1)
    assert not [each for each in changes if each.at < first_pair]
    assert changes[0].reason is not Reason.EXPLORES


def test_once_requests_are_refused_one_is():
    # No backlog is ever served: who waits for a batch of 33 ms is refused, and only single requests are measured.
    device = Device(times=lambda rows, _: 0.03 + 0.003 * rows, executors=4)
    policy = for_p99(0.0435, Objective.EFFICIENCY)
    _, decisions = tuned(until(Poisson(60), 5.0, Random(1)), device, policy, seconds=5.0)
    assert Reason.EXPLORES in {decision.reason for decision in decisions if decision.change}


# -- what it may cost


def test_a_setting_that_may_miss_the_slo_is_explored_only_from_what_was_not_missed():
    assert candidate(420, moving=False) is None
    found = candidate(420, moving=False, spare=420 / SPENDS)
    assert found is not None
    assert found.max_batch > 9


def test_beyond_the_capacity_nothing_is_explored_that_may_lose_much_of_the_load():
    # 12 rows, as slow as they may be, serve 820/s; 24 nearly as many as 32, which is 1,120/s.
    flat = replace(ServiceTime.measured({1: 0.0063, 4: 0.0091, 32: 0.0285, 64: 0.057}), largest_in_flight=8)
    found = candidate(1300, moving=False, service=flat)
    assert found is None or found.max_batch >= 24


def test_misses_that_the_slo_allows_and_were_not_made_are_saved_up():
    exploration = Exploration()
    for _ in range(20):
        exploration.earn(0.005, 100, 0, 1, 100.0)
    assert exploration.spare == pytest.approx(0.01 * 2000)
    exploration.earn(0.005, 80, 20, 1, 100.0)
    assert exploration.spare == pytest.approx(21 - 20)
    exploration.earn(0.005, 0, 100, 1, 100.0)
    assert exploration.spare == 0, "never less than none"
    for _ in range(1000):
        exploration.earn(0.005, 100, 0, 1, 100.0)
    assert exploration.spare == pytest.approx(0.01 * SAVED * 100), "nor more than five minutes' worth"


def test_of_several_replicas_one_replicas_share_is_saved():
    one, four = Exploration(), Exploration()
    one.earn(0.005, 100, 0, 1, 100.0)
    four.earn(0.005, 400, 0, 4, 100.0)
    assert one.spare == four.spare


def test_what_all_replicas_save_may_be_spent_by_the_few_that_explore():
    alone, canary = Exploration(), Exploration()
    alone.earn(0.005, 500, 0, 5, 100.0)
    canary.earn(0.005, 500, 0, 1, 100.0)
    assert canary.spare == pytest.approx(5 * alone.spare)
    for _ in range(1000):
        canary.earn(0.005, 500, 0, 1, 100.0)
    assert canary.spare == pytest.approx(0.01 * SAVED * 100), "no replica is to lose more than one alone may"


def test_candidates_are_looked_for_on_the_way_and_at_a_quarter_more_load():
    exploration = Exploration()
    assert exploration.is_due(100.0, leaves=True)
    assert not exploration.is_due(100.0 * RISE - 1, leaves=False)
    assert exploration.is_due(100.0 * RISE, leaves=False)
    assert not exploration.is_due(100.0 * RISE, leaves=False)


# -- more batches in flight


def test_beyond_the_capacity_more_batches_in_flight_are_explored_until_more_were_seen_than_are_computed():
    unseen = replace(KNOWN, largest_in_flight=1)
    found = candidate(700, moving=False, service=unseen, most_in_flight=8)
    assert found is not None
    assert found.max_in_flight == 4
    again = candidate(700, moving=False, service=replace(KNOWN, largest_in_flight=2), most_in_flight=8)
    assert again is None or again.max_in_flight == 1


def test_it_ends_once_as_many_were_in_flight():
    exploration = begun(8, flights=4, service=replace(KNOWN, largest_in_flight=1))
    assert not observe(exploration, 0.5, seen(8, 50), replace(KNOWN, largest_in_flight=1))
    assert observe(exploration, 1.0, seen(8, 50), replace(KNOWN, executors=2, largest_in_flight=4))


def test_a_size_is_explored_by_its_batches_where_as_many_were_in_flight_before():
    service = replace(KNOWN, largest_in_flight=1)
    exploration = Exploration()
    exploration.begin(point(18, 4), point(8, 4), service, 0.0)
    assert observe(exploration, 0.5, seen(12, BATCHES), service)


# -- what became of it


def test_it_lasts_until_enough_larger_batches_were_seen():
    exploration = begun(18)
    assert exploration.is_under_way
    assert exploration.candidate is None
    assert not observe(exploration, 0.5, seen(9, 50)), "nothing larger than was known"
    assert not observe(exploration, 1.0, seen(10, BATCHES - 1))
    assert observe(exploration, 1.5, seen(12, 1))
    assert not exploration.is_under_way
    assert pause(exploration, 18) > 1e9, "it showed what it takes"
    assert pause(exploration, 36) == 0


def test_one_that_nothing_filled_waits_longer_each_time():
    exploration = Exploration()
    pauses, now = [], 0.0
    for _ in range(3):
        exploration.begin(point(18), point(8), KNOWN, now)
        now += LASTS
        assert observe(exploration, now, seen(5, 50))
        pauses.append(pause(exploration, 18) - now)
        now = pause(exploration, 18)
    assert pauses == [LASTS, 2 * LASTS, 4 * LASTS]


def test_one_that_costs_more_than_can_be_paid_for_ends():
    exploration = begun(18)
    assert not observe(exploration, 0.5, seen(9, 50), late=LEAST_CREDIT - 1)
    assert observe(exploration, 1.0, seen(9, 50), late=1.0)
    assert pause(exploration, 18) == 1.0 + LASTS
    rich = Exploration()
    rich.spare = 10 * LEAST_CREDIT / SPENDS
    rich.begin(point(18), point(8), KNOWN, 0.0)
    assert not observe(rich, 0.5, seen(9, 50), late=10 * LEAST_CREDIT - 1)
    assert observe(rich, 1.0, seen(9, 50), late=1.0)


def test_of_a_noisy_model_more_batches_have_to_be_seen():
    assert batches_needed(KNOWN) == BATCHES
    assert batches_needed(replace(KNOWN, noise=0.3)) == pytest.approx(28.0)
    noisy = replace(KNOWN, noise=0.3)
    exploration = begun(18, service=noisy)
    assert not observe(exploration, 0.5, seen(12, 27), noisy)
    assert observe(exploration, 1.0, seen(12, 1), noisy)


def test_one_that_was_broken_off_may_be_made_again():
    exploration = begun(18)
    exploration.stop()
    assert not exploration.is_under_way
    assert pause(exploration, 18) == 0


def test_what_was_explored_is_no_candidate_until_the_model_changes():
    exploration = Exploration()
    found = candidate(230, moving=True, exploration=exploration)
    exploration.begin(found, point(9), KNOWN, 0.0)
    observe(exploration, 0.5, seen(16, BATCHES))
    again = candidate(230, moving=True, exploration=exploration)
    assert again is None or again.max_batch != found.max_batch
    exploration.stop(forgets=True)
    assert candidate(230, moving=True, exploration=exploration) == found


# -- with the tuner

CORE = {1: 0.00069, 2: 0.00130, 3: 0.00191, 4: 0.00252, 6: 0.00476}
"""A model on one core: four rows together cost the least."""


def core(rows, _):
    return CORE[rows] if rows <= 4 else CORE[4] + 0.00112 * (rows - 4)


@pytest.mark.parametrize("seed", [1, 2, 3, 6, 7])
def test_requests_do_not_pass_on_the_chance_that_more_are_computed_at_once(seed):
    device = Device(times=core, cv=0.05)
    _, decisions = tuned(until(Poisson(300), 25, Random(seed)), device, for_p99(0.02, Objective.EFFICIENCY), seed=seed)
    assert not any(decision.parameters.pass_through for decision in decisions)


@pytest.mark.parametrize("seed", [6, 7, 9, 11])
def test_what_a_few_unlucky_batches_hide_is_found(seed):
    # At 620 requests/s four rows save 9 % against passing, three 8, two 6: shown by 3 to 30 batches that spread by 5 %.
    device = Device(times=core, cv=0.05)
    outcome, decisions = tuned(
        until(Poisson(620), 20, Random(seed)), device, for_p99(0.02, Objective.EFFICIENCY), seed=seed
    )
    settled = outcome.summary(10.0)
    assert settled.device_busy / settled.answers < 0.000643
    assert flips(decisions) == 0


@pytest.mark.parametrize("seed", [2, 3])
def test_the_saving_behind_a_step_is_found_while_the_slo_is_met(seed):
    # From five rows at 2.2 ms each on nothing looks cheaper, and 25 of them take 1.1 ms each. With seed 1 ten rows
    # come together at the first load: from there 16 may be too slow for the load, and 5 % of the budget is less.
    rising = [*until(Poisson(110), 40, Random(seed)), *(40 + time for time in until(Poisson(400), 240, Random(seed)))]
    outcome, decisions = tuned(rising, TILED, for_p99(0.12, Objective.EFFICIENCY))
    settled = outcome.summary(260.0)
    assert settled.device_busy / settled.answers < 0.0013
    assert outcome.summary().miss_fraction < 0.01
    assert State.EXPLORING in {decision.state for decision in decisions}


def test_one_that_bursts_have_to_fill_is_not_given_up_before_they_come():
    outcome, _ = tuned(until(Gamma(400, 2.0), 80, Random(3)), TILED, LIMITED)
    settled = outcome.summary(40.0)
    assert settled.miss_fraction < 0.01
    assert settled.device_busy / settled.answers < 0.0015


def test_what_may_miss_the_slo_is_explored_once_as_much_was_saved_up():
    # Up to nine rows 1.25x the load would be too much; a tile of 32 carries three times as much.
    outcome, decisions = tuned(until(Poisson(395), 200, Random(5)), TILED, LIMITED)
    explored = next(decision.at for decision in decisions if decision.parameters.max_batch > 12)
    assert explored < 150
    settled = outcome.summary(150.0)
    assert settled.device_busy / settled.answers < 0.0013
    assert settled.miss_fraction < 0.001
    assert outcome.summary().miss_fraction < 0.005


CLIFF = Device(times=lambda rows, _: (0.024 + 0.0016 * rows) * (2 if rows > 4 else 1), cv=0.1)
"""Five rows take twice as long as four do; from ten on rows are cheaper than in batches of four."""


def test_beyond_the_capacity_a_size_that_seems_dear_is_explored_for_what_a_few_batches_lose():
    # By the line through 4 and 6 rows, 12 take 180 ms and lose half of the requests: for six batches, 1.1 s.
    service = ServiceTime.measured({rows: CLIFF.times(rows, 0) for rows in (1, 2, 3, 4, 6)}, noise=0.1)
    found = candidate(160.0, moving=False, service=service, target=0.32)
    assert found is not None
    assert found.max_batch == 12
    # On a device ten times as slow they would lose 11 s.
    assert candidate(16.0, moving=False, service=service.scaled(10), target=3.2) is None


@pytest.mark.parametrize("seed", [1, 2])
def test_the_capacity_behind_a_cliff_is_found(seed):
    # Batches of four carry 131 requests/s, of 32 carry 213.
    rising = [*until(Poisson(60), 40, Random(seed)), *(40 + time for time in until(Poisson(150), 40, Random(seed + 9)))]
    outcome, decisions = tuned(rising, CLIFF, for_p99(0.32))
    assert outcome.summary(60.0).miss_fraction < 0.01
    assert decisions[-1].parameters.max_batch > 12


@pytest.mark.parametrize("objective", [Objective.EFFICIENCY, Objective.BALANCED])
def test_beyond_the_capacity_a_size_is_explored_though_it_is_the_best_choice_already(objective):
    # Where first batches are slow, first calls show one and two rows only. Four may take twice as long as two: no sure
    # gain. By the last digit they were the choice; nothing gained on the choice, and 54 % were refused for good.
    device = Device(times=lambda rows, _: max(0.013, 0.0009 * rows), cv=0.02, cold=30)
    arrivals = until(Poisson(500), 25.0, Random(1))
    outcome, _ = tuned(arrivals, device, for_p99(0.15, objective), seconds=25.0, as_sidecars=True)
    assert outcome.summary(10.0).miss_fraction < 0.05


def test_where_rows_get_dearer_for_good_it_comes_to_rest():
    # 12 % more per row with every doubling: sizes are explored once each, if at all, and never again.
    device = Device(times=lambda rows, _: 0.003 * rows**1.16, cv=0.05)
    outcome, decisions = tuned(until(Poisson(150), 600, Random(4)), device, LIMITED)
    assert sum(decision.reason is Reason.EXPLORES and decision.change for decision in decisions) <= 3
    assert not any(decision.change for decision in decisions if decision.at > 10.0)
    assert outcome.summary().miss_fraction < 0.002


# -- what is measured for the capacity


def measured(*seen, noise=0.0, count=30.0):
    """A latency model; the sizes ``seen`` were measured ``count`` times each."""
    curve = ServiceTime.measured({size: CURVE.time(size) for size in seen}, noise=noise)
    return replace(curve, counts=tuple(count for _ in seen))


def order(service, target, limits=LIMITS):
    """The sizes that are measured one after the other, each taking what it does."""
    found = []
    seen = list(service.sizes)
    while sizes := to_measure(service, limits, target):
        size = sizes[0]
        assert size not in seen
        found.append(size)
        seen = sorted([*seen, size])
        service = measured(*seen)
    return found


def test_the_largest_is_measured_first_and_at_most_twice_the_largest_known():
    found = order(measured(1, 2, 3, 4), 1.0)
    assert found[:4] == [8, 16, 32, 64]
    assert sorted(found) == [8, 12, 16, 24, 32, 48, 64]


def test_what_lies_between_comes_first_where_a_step_may_be():
    """48 rows take twice as long as 24 in tiles of 32, so 32 may take as little as 24. 64 take hardly more than 48."""
    tiles = {rows: 0.004 + 0.024 * -(-rows // 32) for rows in range(1, 129)}
    service = replace(ServiceTime.measured({rows: tiles[rows] for rows in (1, 2, 4, 8, 16, 24)}), largest_in_flight=2)
    assert to_measure(service, LIMITS, 1.0)[0] == 48
    stepped = replace(
        ServiceTime.measured({rows: tiles[rows] for rows in (1, 2, 4, 8, 16, 24, 48)}), largest_in_flight=2
    )
    assert to_measure(stepped, LIMITS, 1.0)[0] == 32


def test_a_batch_that_takes_too_much_of_the_slo_is_not_measured():
    service = measured(1, 2, 3, 4)
    target = max(service.time(6) / TAKES, service.upper(6))
    assert to_measure(service, LIMITS, 1.01 * target) == (6,)
    assert to_measure(service, LIMITS, 0.99 * target) == ()


def test_nothing_is_measured_beyond_the_bounds_nor_where_rows_get_dearer():
    assert order(measured(1, 2, 3, 4), 1.0, replace(LIMITS, max_batch=6)) == [6]
    dear = ServiceTime.measured({rows: 0.001 * rows**1.5 for rows in (1, 2, 3, 4)})
    assert to_measure(dear, LIMITS, 10.0) == ()


def test_sizes_whose_rows_are_dear_anyway_are_not_measured():
    # Nearly all of the cost is fixed: a batch of one row takes a third of the time of 64.
    times = {rows: 0.024 + 0.0008 * rows for rows in (17, 24, 48, 64)}
    service = ServiceTime.measured(times)
    assert to_measure(service, LIMITS, 1.0) == (32,), "its rows cost 1.35 times those of 64, at best"
    assert to_measure(ServiceTime.measured({**times, 32: 0.0496}), LIMITS, 1.0) == ()


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
def test_a_size_measured_a_few_times_is_measured_again_after_all_others(noise):
    bound, seen = replace(LIMITS, max_batch=8), (1, 2, 3, 4, 6, 8)
    service = replace(measured(*seen, noise=noise), counts=(30.0, 30.0, 30.0, 30.0, 30.0, 1.0))
    needed = batches_needed(service)
    assert to_measure(service, LIMITS, 1.0)[0] == 16
    for count, wanted in ((1.0, (8,)), (needed - 0.1, (8,)), (needed, ())):
        assert to_measure(replace(service, counts=(*service.counts[:-1], count)), bound, 1.0) == wanted


def test_sizes_between_two_measured_ones_are_measured_where_their_rows_may_cost_least():
    # A device with 1 row in 0.69 ms and 17 in 18 ms looks as if batching gained nothing, but 4 may take 2.5 ms.
    service = ServiceTime.measured({1: 0.00069, 17: 0.018})
    assert to_measure(service, LIMITS, 1.0)[0] == 16
    assert order(measured(1, 17), 1.0)
