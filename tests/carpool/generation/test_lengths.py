from random import Random

import pytest

from carpool.generation.lengths import UNKNOWN, OutputLengths
from carpool.generation.requests import Request


def ended(prompt, output):
    request = Request(0, 0.0, prompt)
    request.output_tokens = output
    return request


def taught(lengths, prompt=500):
    known = OutputLengths()
    for output in lengths:
        known.add(ended(prompt, output))
    return known


def test_before_any_answer_a_guess_is_used_and_the_clients_limit_bounds_it():
    known = OutputLengths()
    assert known.remaining(Request(0, 0.0, 10), 0) == UNKNOWN
    assert known.remaining(Request(0, 0.0, 10, max_tokens=50), 0) == 50
    assert known.remaining(Request(0, 0.0, 10, max_tokens=50), 30) == 20


def test_the_mean_is_learned_within_a_bin():
    random = Random(0)
    lengths = [int(random.lognormvariate(5.0, 0.8)) + 1 for _ in range(2000)]
    known = taught(lengths)
    assert known.remaining(Request(0, 0.0, 500), 0) == pytest.approx(sum(lengths) / len(lengths), rel=0.25)


def test_an_answer_that_is_long_already_is_expected_to_go_on():
    # Half of the answers have 10 tokens, half 1,000: after 20 tokens it is one of the long ones.
    known = taught([10, 1000] * 100)
    request = Request(0, 0.0, 500)
    assert known.remaining(request, 0) == pytest.approx(505, rel=0.25)
    assert known.remaining(request, 20) == pytest.approx(980, rel=0.25)


def test_classes_of_prompts_are_apart_and_a_new_one_starts_with_what_all_show():
    known = taught([20] * 50, prompt=100)
    for _ in range(50):
        known.add(ended(5000, 800))
    assert known.remaining(Request(0, 0.0, 100), 0) < 30
    assert known.remaining(Request(0, 0.0, 5000), 0) > 700
    assert 30 < known.remaining(Request(0, 0.0, 30_000), 0) < 700


def test_other_lengths_are_learned_anew():
    known = taught([20] * 1000 + [400] * 1500)
    assert known.remaining(Request(0, 0.0, 500), 0) > 350


def test_beyond_everything_that_ended_it_may_double():
    assert taught([20] * 50).remaining(Request(0, 0.0, 500), 3000) == 3000
