import pytest
from engines import LLAMA, SLO

from carpool.generation.calibration import (
    ENOUGH,
    ENOUGH_ANSWERS,
    EVERY,
    MOST_TTFT,
    Answer,
    Calibration,
    FirstToken,
    ratio,
)
from carpool.generation.meter import Meter, Totals
from carpool.generation.requests import Request
from carpool.generation.step_model import StepModel, sections

MODEL = StepModel(LLAMA.base, LLAMA.sequence, LLAMA.kv_token, LLAMA.prompt_token)


def answer(times=1.0, output=200, sequences=50, prompt=1000, prompt_rate=0.0):
    """An answer that took ``times`` as long as the model says."""
    steps = output - 1
    kv = sequences * 1100
    row = (float(steps), *(steps * part for part in sections(sequences)), steps * kv, 0.0)
    seconds = times * steps * LLAMA.seconds(sequences, kv, 0) / (1 - LLAMA.prompt_token * prompt_rate)
    return Answer(Totals(seconds, row, prompt_rate * seconds), prompt, output)


def calibrated(answers, target=SLO.tpot):
    found = Calibration()
    found._answers.extend(answers)
    for _ in range(20):
        found.refit(MODEL, SLO._replace(tpot=target))
    return found.tpot


def test_the_ratio_is_to_what_the_model_says_of_the_same_steps_and_prompts():
    assert ratio(answer(1.0), MODEL) == pytest.approx(1.0)
    assert ratio(answer(1.3, prompt_rate=5000.0), MODEL) == pytest.approx(1.3)
    assert ratio(answer(1.3, output=1), MODEL) == 0.0


def test_a_model_that_was_wrong_leaves_no_trace_once_it_is_right():
    wrong = StepModel(*(0.5 * value for value in (LLAMA.base, LLAMA.sequence, LLAMA.kv_token, LLAMA.prompt_token)))
    assert ratio(answer(1.0), wrong) == pytest.approx(2.0)
    assert ratio(answer(1.0), MODEL) == pytest.approx(1.0)


def test_even_requests_need_no_margin_and_a_spread_needs_one():
    assert calibrated([answer(1.0)] * 150) == pytest.approx(1.0, abs=0.08)
    spread = [answer(0.8 + 0.5 * i / 150) for i in range(150)]
    assert 1.15 < calibrated(spread) < 1.45


def test_a_few_that_can_never_make_it_do_not_close_the_gate():
    # A fifth of the answers have three tokens and met a long prompt: no number of sequences helps them.
    hopeless = [answer(6.0, output=3)] * 30
    assert calibrated([answer(1.0)] * 120 + hopeless) < 1.2


def test_few_answers_change_nothing():
    assert calibrated([answer(3.0)] * (ENOUGH_ANSWERS - 1)) == Calibration().tpot


def test_the_time_for_a_first_token_is_a_quantile_of_what_it_took():
    found = Calibration()
    for i in range(100):
        expected = 1000 * LLAMA.prompt_token + 2 * LLAMA.seconds(10, 10_000, 0)
        found._firsts.append(FirstToken(0.1 * i, expected * (1 + i / 100), 1000, 10, 10_000.0))
    for _ in range(EVERY):
        found.window(MODEL, SLO)
    assert found.ttft == pytest.approx(1.95, abs=0.02)


def test_a_model_in_which_steps_and_prompts_cost_nothing_is_no_error():
    found = Calibration()
    found._firsts.extend([FirstToken(0.0, 0.1, 1000, 0, 0.0)] * ENOUGH)
    found.refit(StepModel(0.0, 0.001, 0.0, 0.0), SLO)
    assert found.ttft == MOST_TTFT


def first_tokens(found, count, seconds, since, key=0):
    """First tokens that take so many seconds, one each second, as of a gate that is nearly shut."""
    meter = Meter(MODEL)
    for i in range(count):
        each = Request(key + i, since + i, 600)
        found.admitted(each, since + i, meter)
        found.first_token(each, since + i + seconds, meter)
    found.refit(MODEL, SLO)
    return found.ttft


def test_a_stall_is_no_multiple_of_the_forecast_and_counts_for_a_minute():
    found = Calibration()
    usual = 1.5 * MODEL.first_token_seconds(600, 0, 0.0)
    assert first_tokens(found, 100, 15.0, 0.0) == MOST_TTFT
    # They came from 15 to 114 s.
    assert first_tokens(found, 20, usual, 150.0, key=100) == MOST_TTFT
    assert first_tokens(found, 10, usual, 170.0, key=200) == pytest.approx(1.5)


def test_without_newer_first_tokens_the_last_ones_count_however_old():
    found = Calibration()
    usual = 1.5 * MODEL.first_token_seconds(600, 0, 0.0)
    first_tokens(found, ENOUGH, usual, 0.0)
    assert first_tokens(found, 1, usual, 1000.0, key=100) == pytest.approx(1.5)
