import pytest
from engines import gate
from hypothesis import given
from hypothesis import strategies as st

from carpool.generation.kv_budget import KvBudget, peak
from carpool.generation.requests import Request


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 100)), max_size=12))
def test_the_peak_is_that_of_playing_it_out(streams):
    most = 0
    for step in range(61):
        most = max(most, sum(held + step for left, held in streams if left >= step))
    assert peak([(float(left), float(held)) for left, held in streams]) == pytest.approx(most)


def test_the_size_of_the_cache_follows_from_its_reported_use():
    budget = KvBudget(90.0)
    budget.report(0.01, 900.0)
    assert budget.tokens is None
    budget.report(0.25, 20_000.0)
    assert budget.tokens == pytest.approx(80_000)
    # A prompt that is half computed makes the cache look smaller than it is.
    budget.report(0.50, 30_000.0)
    assert budget.tokens > 79_000


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
