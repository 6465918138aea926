from math import inf

import pytest
from engines import gate

from carpool.generation.kv_budget import KvBudget, peak
from carpool.generation.requests import Admit, Request, Slo, State


def stream(prompt, generated):
    return Request(0, 0.0, prompt), float(generated)


def test_streams_of_known_length_are_all_there_until_they_end():
    def survival(request, generated, ahead):
        return float(generated + ahead < 200)

    # After 96 steps both are there; after 192 only the younger one is.
    both = [stream(100, 100), stream(100, 0)]
    assert peak(both, survival, inf) == pytest.approx((100 + 100 + 96) + (100 + 96))
    assert peak(both, survival, 250) > 250


def test_where_answers_end_at_any_time_streams_do_not_all_grow():
    # Half of those alive end within 100 steps: 1,000 streams of 1,000 tokens shrink faster than they grow.
    def survival(request, generated, ahead):
        return 0.5 ** (ahead / 100)

    many = [stream(1000, 0)] * 1000
    alive = 0.5**0.32
    spread = 2 * (1000 * alive * (1 - alive)) ** 0.5 * 1032
    assert peak(many, survival, inf) == pytest.approx(1000 * 1032 * alive + spread)
    assert peak(many, survival, inf) < 900_000


def test_the_size_of_the_cache_follows_from_its_reported_use():
    budget = KvBudget(90.0)
    budget.report(0.01, 900.0, 0.0)
    assert budget.tokens is None
    budget.report(0.25, 20_000.0, 0.0)
    assert budget.tokens == pytest.approx(80_000)
    # A prompt that is half computed makes the cache look smaller than it is.
    budget.report(0.50, 30_000.0, 0.0)
    assert budget.tokens > 79_000


def test_the_size_that_the_engine_states_is_a_first_guess():
    # Blocks of a model whose layers are in seven groups: 25,000 blocks of 16 tokens hold a seventh of 400,000.
    budget = KvBudget(80.0)
    budget.guess(400_000.0)
    assert budget.tokens == 400_000.0
    for _ in range(300):
        budget.guess(400_000.0)
        budget.report(0.9, 0.9 * 57_000, 0.0)
    assert budget.tokens == pytest.approx(57_000, rel=0.02)
    # Prompts that share a prefix: 200,000 tokens are in half of the cache
    budget.report(0.5, 200_000.0, 0.0)
    assert budget.tokens == 400_000.0


@pytest.mark.parametrize("known", ["set", "stated"])
def test_an_old_reading_of_a_cache_that_was_empty_does_not_enlarge_it(known):
    budget = KvBudget(80.0, 100_000.0 if known == "set" else None)
    budget.guess(100_000.0)
    budget.report(0.0, 80_000.0, 0.0)
    budget.report(0.049, 80_000.0, 0.0)
    assert budget.tokens == 100_000.0


def test_without_a_size_everything_fits():
    budget = KvBudget(90.0)
    assert budget.fits(Request(0, 0.0, 10**6), gate().meter)


def test_what_would_overflow_while_it_grows_does_not_fit():
    # 10,000 tokens. Each stream has 1,000 tokens and 1,000 more to come: five of them fill it at their end.
    budget = KvBudget(100.0, 10_000)
    for key in range(30):
        done = Request(key, 0.0, 1000)
        done.output_tokens = 1000
        budget.lengths.add(done)
    meter = gate().meter
    admitted = 0
    for key in range(10):
        request = Request(key, 0.0, 1000)
        request.cost = 3000.0
        if not budget.fits(request, meter):
            break
        meter.admitted(request)
        admitted += 1
    assert admitted in (4, 5)


def shared(**limits):
    """256 requests of 4,000 tokens, 3,950 of them the same, at an engine of 400,000 tokens and 0.2 s per step.

    The 72 that fit by their number of tokens use 5 % of it after 173 steps. Requests wait for 150 steps at most.
    Returns how many were admitted and refused, and the size believed at the end.
    """
    machine = gate(Slo(30.0, 1.0), **limits)
    machine.report(None, 400_000.0)
    running, refused = {}, []

    def act(actions):
        for action in actions:
            if isinstance(action, Admit):
                running[action.request.key] = action.request
            else:
                refused.append(action)

    for key in range(256):
        act(machine.arrive(Request(key, 0.0, 4000, max_tokens=2000), 0.0))
    for step in range(1, 170):
        now = 0.2 * step
        act(machine.progress(now, float(machine.meter.decoding)))
        for request in [one for one in running.values() if one.state is State.PREFILLING][:8]:
            act(machine.first_token(request, now))
        act(machine.poll(now))
        if step % 5 == 0:
            machine.report((3950 + sum(50 + machine.meter.generated(one) for one in running.values())) / 400_000)
    return len(running), len(refused), machine.kv.tokens


def test_a_stated_size_refuses_no_requests_while_the_cache_is_nearly_empty():
    assert shared(kv_budget_percent=80.0)[:2] == (256, 0)


def test_a_size_that_is_set_refuses_what_it_says():
    assert shared(kv_budget_percent=80.0, kv_tokens=400_000) == (72, 184, 400_000)


@pytest.mark.parametrize(
    ("shares", "steps", "size"),
    [
        ([0.02] * 80, 1.0, 100_000.0),  # 79 steps: a gauge may be half as old
        ([0.02] * 3, 40.0, 200_000.0),
        ([0.02, 0.02, 0.0, 0.02, 0.02], 40.0, 100_000.0),  # 0: nothing is there yet
        ([0.02, 0.02, 0.8, 0.02, 0.02], 40.0, 100_000.0),
        ([0.02] * 100, 40.0, 1_600_000.0),  # 80,000 tokens are 5 % of that
    ],
)
def test_small_shares_double_a_stated_size_once_no_gauge_can_be_so_old(shares, steps, size):
    budget = KvBudget(80.0)
    budget.guess(100_000.0)
    for number, share in enumerate(shares):
        budget.report(share, 80_000.0, steps * number)
    assert budget.tokens == size


def test_a_stale_gauge_in_a_burst_does_not_enlarge_a_cache():
    # 3 % are in use as a burst of 40 x 2,000 tokens comes; the gauge says so for 40 more steps.
    budget = KvBudget(80.0)
    budget.guess(100_000.0)
    for step in range(200):
        held = 3000.0 if step < 100 else 80_000.0
        budget.report(0.03 if step < 140 else 0.8, held, float(step))
    assert budget.tokens == pytest.approx(100_000.0)
