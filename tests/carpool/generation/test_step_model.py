from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.generation.step_model import KNOTS, StepModel, sections

TRUE = (0.0115, 39e-6, 77e-9, 55e-6)


def learn(model, seconds, steps, sequences, kv, prompt_tokens):
    model.learn((steps, *(steps * part for part in sections(sequences)), steps * kv, prompt_tokens), seconds)


def learn_steps(model, seconds_of, sequences, kv, prompt_tokens, noise=1.0, steps=20):
    seconds = steps * seconds_of(sequences, kv) + TRUE[3] * prompt_tokens
    learn(model, noise * seconds, steps, sequences, kv, prompt_tokens)


def line(sequences, kv):
    return TRUE[0] + TRUE[1] * sequences + TRUE[2] * kv


def bend(sequences, kv):
    """Steep up to 32 sequences and flat beyond, as with experts."""
    return 0.004 + 3e-4 * min(sequences, 32) + 2e-5 * max(0, sequences - 32) + 2e-8 * kv


def taught(seconds_of, *, start=TRUE, windows=200, seed=0, most=120):
    random = Random(seed)
    model = StepModel(*start)
    for _ in range(windows):
        sequences = random.randint(1, most)
        learn_steps(model, seconds_of, sequences, sequences * random.randint(200, 2000), random.randint(0, 5000))
    return model


@pytest.mark.parametrize("wrong", [0.5, 2.0, 10.0])
def test_a_line_is_learned_from_any_start(wrong):
    model = taught(line, start=tuple(wrong * value for value in TRUE))
    for sequences, kv in ((1, 1000), (40, 40_000), (100, 150_000)):
        assert model.decode_seconds(sequences, kv) == pytest.approx(line(sequences, kv), rel=0.03)
    assert model.prompt_token == pytest.approx(TRUE[3], rel=0.05)


def test_a_bend_is_learned_which_no_line_fits():
    model = taught(bend)
    for sequences in (4, 16, 32, 64, 100):
        kv = sequences * 1000
        assert model.decode_seconds(sequences, kv) == pytest.approx(bend(sequences, kv), rel=0.06)


def test_a_section_that_was_hardly_reached_goes_on_like_the_one_before():
    # At most 33 sequences: a single one beyond the knot at 32, with noise, says nothing of 64.
    random = Random(1)
    model = StepModel(*TRUE)
    for _ in range(100):
        sequences = random.randint(16, 33)
        learn_steps(model, line, sequences, sequences * 1000, 1000, noise=random.gauss(1, 0.05))
    assert model.decode_seconds(64, 64_000) == pytest.approx(line(64, 64_000), rel=0.15)


def test_an_engine_that_slows_down_is_followed_within_ten_seconds_of_windows():
    model = taught(line)
    slow = taught(line)
    for i in range(20):
        learn_steps(slow, lambda b, kv: 1.5 * line(b, kv), 60 + i, 60_000, 0)
    assert model.decode_seconds(65, 60_000) == pytest.approx(line(65, 60_000), rel=0.03)
    assert slow.decode_seconds(65, 60_000) == pytest.approx(1.5 * line(65, 60_000), rel=0.15)


@given(
    st.lists(
        st.tuples(st.floats(0.3, 3), st.floats(1, 200), st.integers(1, 400), st.floats(0, 4e5), st.integers(0, 20_000)),
        min_size=1,
        max_size=30,
    )
)
def test_no_coefficient_is_ever_negative_and_more_never_takes_less(windows):
    model = StepModel(*TRUE)
    for seconds, steps, sequences, kv, prompt_tokens in windows:
        learn(model, seconds, steps, sequences, kv, prompt_tokens)
    assert all(value >= 0 for value in model.coefficients)
    times = [model.decode_seconds(b, 10_000) for b in (1, 7, 8, 9, 31, 64, 200, 300, 900)]
    assert times == sorted(times)


@given(st.integers(0, 2000))
def test_sections_add_up(sequences):
    parts = sections(sequences)
    assert sum(parts) == sequences
    assert len(parts) == len(KNOTS)
    model = StepModel(0.01, 1e-4, 0.0, 0.0)
    assert model.decode_seconds(sequences, 0) == pytest.approx(0.01 + 1e-4 * sequences)
