import pytest
from engines import LLAMA

from carpool.generation.meter import OWN_PROMPT, PREFILL_HORIZON, Meter
from carpool.generation.requests import Request, State
from carpool.generation.step_model import StepModel


def meter():
    return Meter(StepModel(LLAMA.base, LLAMA.sequence, LLAMA.kv_token, LLAMA.prompt_token))


def started(machine, key, prompt):
    request = Request(key, 0.0, prompt)
    machine.admitted(request)
    request.state = State.DECODING
    machine.first_token(request)
    return request


def test_steps_follow_from_tokens_and_tokens_of_a_stream_from_steps():
    machine = meter()
    first = started(machine, 0, 100)
    machine.progress(0.1, 5)
    second = started(machine, 1, 200)
    machine.progress(0.2, 8)
    assert machine.steps == 9
    assert (machine.generated(first), machine.generated(second)) == (9, 4)
    assert machine.kv == 100 + 200 + 13


def test_each_choice_gets_a_token_in_a_step_and_frees_its_own():
    machine = meter()
    plain, several = started(machine, 0, 100), Request(1, 0.0, 200, choices=3)
    machine.admitted(several)
    assert machine.sequences == 4
    several.state = State.DECODING
    machine.first_token(several)
    machine.progress(0.1, 40)
    assert (machine.steps, machine.generated(plain), machine.generated(several)) == (10, 10, 10)
    assert machine.kv == 300 + 40
    machine.choice_ended(several)
    several.sequences -= 1
    assert (machine.sequences, machine.decoding, machine.kv) == (3, 3, 330)
    machine.progress(0.2, 30)
    machine.ended(several)
    assert (machine.sequences, machine.decoding, machine.steps, machine.kv) == (1, 1, 20, 120)


def test_what_ends_takes_its_tokens_along():
    machine = meter()
    first, second = started(machine, 0, 100), started(machine, 1, 200)
    machine.progress(0.2, 20)
    first.output_tokens = 11
    machine.ended(first)
    assert machine.kv == pytest.approx(210)
    machine.ended(second)
    assert (machine.kv, machine.decoding, len(machine.streams)) == (0, 0, 0)


def test_a_prompt_is_backlog_until_its_first_token_or_its_end():
    machine = meter()
    request = Request(0, 0.0, 500)
    machine.admitted(request)
    request.state = State.PREFILLING
    assert machine.backlog == 500
    assert machine.first_token_seconds(100) == pytest.approx(LLAMA.prompt_token * 600 + 2 * LLAMA.seconds(1, 0, 0))
    machine.ended(request)
    assert machine.backlog == 0


def test_prompts_take_their_share_of_time_from_decoding():
    machine = meter()
    for key in range(10):
        started(machine, key, 1000)
    alone = LLAMA.seconds(11, 11_000, 0)
    # 10,000 tokens were computed in the last moments and 1,000 are to come: 0.6 s of the last.
    share = 11_000 * LLAMA.prompt_token / PREFILL_HORIZON
    assert machine.forecast(1, 1000) == pytest.approx(alone / (1 - share))
    machine.progress(20.0, 100)
    assert machine.prefill_share() < 0.01


def test_a_long_prompt_counts_with_a_part_of_its_prefill():
    machine = meter()
    for key in range(10):
        started(machine, key, 100)
    machine.progress(20.0, 0)
    alone = LLAMA.seconds(11, 33_000, 0)
    # 32,000 tokens take 1.8 s. As load of one second they would leave no time to decode.
    assert machine.forecast(1, 32_000) == pytest.approx(alone / (1 - OWN_PROMPT / PREFILL_HORIZON), rel=0.01)


def test_what_is_computed_of_a_prompt_is_no_longer_ahead_of_the_next():
    machine = meter()
    first = Request(0, 0.0, 16_000)
    machine.admitted(first)
    alone = machine.first_token_seconds(100)
    machine.progress(0.5, 0)
    assert machine.first_token_seconds(100) == pytest.approx(alone - 0.5, abs=0.001)
    machine.progress(5.0, 0)
    assert machine.ahead == 0
    machine.admitted(Request(1, 5.0, 1000))
    first.state = State.DECODING
    machine.first_token(first)
    assert machine.ahead == 1000


@pytest.mark.parametrize("leaves", [0, 1])
def test_a_prompt_that_leaves_while_it_is_computed_takes_the_time_spent_on_it_along(leaves):
    machine = meter()
    prompts = [Request(0, 0.0, 28_000), Request(1, 0.0, 16_000)]
    for each in prompts:
        machine.admitted(each)
        each.state = State.PREFILLING
    # 0.66 s are 12,000 tokens: of the first prompt 16,000 are left. The second has not begun.
    machine.progress(12_000 * LLAMA.prompt_token, 0)
    machine.ended(prompts[leaves])
    assert machine.ahead == pytest.approx(16_000, abs=1)


def test_windows_teach_the_model():
    machine = meter()
    for key in range(20):
        started(machine, key, 1000)
    now, closed = 0.0, 0
    for step in range(400):
        now += 2 * LLAMA.seconds(20, 20_000 + 20 * step, 0)
        machine.progress(now, 20)
        closed += machine.close()
    assert closed > 10
    assert machine.model.decode_seconds(20, 24_000) == pytest.approx(2 * LLAMA.seconds(20, 24_000, 0), rel=0.1)


def test_a_window_of_prompts_only_teaches_what_they_take():
    machine = meter()
    started(machine, 0, 100)
    # An engine that computes prompts first decodes nothing meanwhile.
    for key in range(1, 21):
        request = Request(key, 0.0, 1000)
        machine.admitted(request)
        machine.progress(0.1 * key, 0)
        request.state = State.DECODING
        machine.first_token(request)
        machine.close()
    assert machine.model.prompt_token == pytest.approx(0.1 / 1000, rel=0.1)


def test_assumed_tokens_teach_nothing_and_a_whole_answer_does():
    machine = meter()
    first = started(machine, 0, 100)
    before = list(machine.model.coefficients)
    machine.progress(0.6, 100, seen=False)  # 6 ms a step were assumed
    assert machine.close()
    assert machine.model.coefficients == before
    machine.learn_answer(first, 30)
    assert machine.model.decode_seconds(1, 150) == pytest.approx(0.6 / 30, rel=0.05)
    machine.progress(1.2, 60)
    assert machine.close()
    assert machine.model.coefficients != before


def test_a_window_that_was_partly_assumed_does_not_change_the_model():
    machine = meter()
    started(machine, 0, 100)
    before = list(machine.model.coefficients)
    machine.progress(0.1, 50, seen=False)
    machine.progress(0.6, 50)
    assert machine.close()
    assert machine.model.coefficients == before


def test_a_whole_answer_counts_the_prompts_since_its_admission():
    machine = meter()
    started(machine, 0, 100)
    waiting = Request(1, 0.0, 1_000)
    machine.admitted(waiting)
    machine.progress(0.5, 10, seen=False)
    waiting.state = State.DECODING
    machine.first_token(waiting)
    machine.progress(1.0, 20, seen=False)
    learned = []
    machine.model.learn = lambda row, seconds, fade: learned.append((row, seconds, fade))
    machine.learn_answer(waiting, 40)
    ((row, seconds, fade),) = learned
    assert (row[0], row[1], row[-1], seconds) == (40, pytest.approx(60), 1_000, 1.0)  # 1 sequence in half of the steps
    assert fade == pytest.approx(0.95**2)


def test_an_answer_that_met_no_step_teaches_nothing():
    machine = meter()
    first = started(machine, 0, 100)
    before = list(machine.model.coefficients)
    machine.learn_answer(first, 3)
    assert machine.model.coefficients == before


def test_a_sequence_whose_only_token_has_come_does_not_decode():
    machine = meter()
    stream, score = started(machine, 0, 100), Request(1, 0.0, 200, max_tokens=1, choices=2)
    machine.admitted(score)
    machine.first_token(score)
    score.state = State.DECODING
    assert (machine.decoding, machine.kv) == (1, 100)
    machine.progress(0.1, 5)
    machine.choice_ended(score)
    machine.ended(score)
    assert (machine.decoding, machine.kv, machine.steps, machine.backlog) == (1, 105, 5, 0)
    machine.ended(stream)
    assert (machine.decoding, machine.kv) == (0, 0)


@pytest.mark.parametrize("together", [True, False])
def test_prompts_are_learned_from_while_nothing_decodes(together):
    """Prompts of one step end together: in the proxy, within a millisecond."""
    machine, now = meter(), 0.0
    true = 3 * LLAMA.prompt_token
    for step in range(200):
        group = [Request(10 * step + i, now, 400, max_tokens=1) for i in range(4)]
        for request in group:
            machine.admitted(request)
        now += LLAMA.base + 4 * 400 * true
        for i, request in enumerate(group):
            machine.progress(now if together else now + i * 3e-4, 0)
            request.state = State.DECODING
            machine.first_token(request)
            machine.ended(request)
        machine.close()
    assert machine.model.prompt_token == pytest.approx(true, rel=0.02)
    assert machine.model.coefficients[0] == LLAMA.base
