from random import Random

import pytest

from carpool.generation.lengths import UNKNOWN, OutputLengths
from carpool.generation.requests import Request


def ended(output):
    request = Request(0, 0.0, 500)
    request.output_tokens = output
    return request


def taught(lengths):
    known = OutputLengths()
    for output in lengths:
        known.add(ended(output))
    return known


def request(max_tokens=None):
    return Request(1, 0.0, 10, max_tokens=max_tokens)


def test_before_any_answer_a_guess_is_used_and_the_clients_limit_bounds_it():
    known = OutputLengths()
    assert known.expected(request()) == UNKNOWN
    assert known.expected(request(50)) == 50
    assert known.survival(request(), 100, 400) == 1.0
    assert known.survival(request(), 100, 500) == 0.0
    assert known.survival(request(200), 100, 100) == 0.0


def test_the_mean_is_learned_within_a_bin():
    random = Random(0)
    lengths = [int(random.lognormvariate(5.0, 0.8)) + 1 for _ in range(2000)]
    known = taught(lengths)
    assert known.expected(request()) == pytest.approx(sum(lengths) / len(lengths), rel=0.25)
    assert known.expected(request(20)) == 20


def test_an_answer_that_is_long_already_goes_on():
    # Half of the answers have 10 tokens, half 1,000: after 20 tokens it is one of the long ones.
    known = taught([10, 1000] * 100)
    assert known.survival(request(), 0, 100) == pytest.approx(0.5, abs=0.05)
    assert known.survival(request(), 20, 900) == 1.0
    assert known.survival(request(), 20, 1300) == 0.0


def test_other_lengths_are_learned_anew():
    known = taught([20] * 1000 + [400] * 1500)
    assert known.expected(request()) > 350


def test_beyond_everything_that_ended_it_may_double():
    known = taught([20] * 50)
    assert known.survival(request(), 3000, 3000) == 1.0
    assert known.survival(request(), 3000, 3001) == 0.0
