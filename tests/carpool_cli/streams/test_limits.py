import pytest
from msgspec.structs import replace

from carpool.generation.profiles import EngineProfile, Linear
from carpool.generation.requests import Slo
from carpool_cli.streams.limits import recommend
from carpool_cli.streams.loads import Lengths
from carpool_cli.streams.options import Asked, StreamLoad
from carpool_cli.streams.twin import StreamTwin


def asked(step, rate=None, tpot=0.05, **changes):
    profile = EngineProfile(name="test", source="made up", kv_tokens=400_000, step=step, **changes)
    return Asked(profile, Slo(2.0, tpot), StreamLoad(Lengths([(1000, 101)], "alike"), 20.0, 0, rate, 1.0, None))


STEP = Linear(0.01, 2e-4, 1e-7, 5e-5)


def test_its_limits_are_as_good_as_any_that_were_not_tried():
    given = asked(STEP)
    found = recommend(given)
    twin = StreamTwin(given, 1.3 * found.capacity)
    ours = twin.limited(found.max_num_seqs, found.max_num_queued_tokens, found.max_num_batched_tokens)
    assert ours == found.results[0]
    for sequences in (10, 30, 200):
        for queued in (3_000, 30_000):
            assert twin.limited(sequences, queued, 2048).goodput <= 1.05 * ours.goodput


def test_nothing_is_recommended_where_one_request_alone_is_too_slow():
    assert recommend(asked(STEP, tpot=0.009)) is None


def test_the_engine_s_tokens_per_step_are_kept_where_others_bring_nothing():
    # Prompts cost nothing, so it is all one how they are cut.
    found = recommend(asked(Linear(0.01, 2e-4, 1e-7, 0.0), max_batched_tokens=3000))
    assert found.max_num_batched_tokens == 3000


def test_as_many_answers_of_one_token_run_as_fill_a_step():
    profile = replace(asked(STEP).profile, max_running=1024)
    given = Asked(profile, Slo(2.0, 0.05), StreamLoad(Lengths([(100, 1)], "alike"), 20.0, 0, None, 1.0, None))
    found = recommend(given)
    assert found.max_num_seqs > 10
    assert found.results[0].goodput > 0.9 * found.capacity
    assert found.reasons[0].endswith("of prompts alone: answers of one token have no TPOT")
    twin = StreamTwin(given, 1.3 * found.capacity)
    for sequences in (1, 5, 500):
        other = twin.limited(sequences, found.max_num_queued_tokens, profile.max_batched_tokens)
        assert other.goodput <= 1.05 * found.results[0].goodput


def test_an_overload_of_thousands_of_requests_a_second_is_a_short_one():
    fast = EngineProfile(name="test", source="made up", kv_tokens=100_000, step=Linear(0.0115, 0.0, 0.0, 0.0))
    slow = Asked(fast, Slo(0.1, 0.05), StreamLoad(Lengths([(50, 10)], "alike"), 3600.0, 0, None, 1.0, None))
    found = recommend(slow)
    assert found.load == pytest.approx(1.3 * found.capacity, rel=0.05)
    assert found.load > 3000
