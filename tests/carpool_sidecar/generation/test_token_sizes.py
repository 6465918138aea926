import pytest

from carpool_sidecar.generation.token_sizes import MOST, TokenSizes


def test_until_a_count_comes_four_bytes_are_a_token():
    assert TokenSizes().prompt_tokens("m", 400) == 100
    assert TokenSizes().per_event("m") == 1.0


def test_a_template_and_the_bytes_per_token_are_learned():
    sizes = TokenSizes()
    for size in (100, 5000, 900, 20_000, 300):
        sizes.learn_prompt("m", size, 30 + size // 5)
    assert sizes.prompt_tokens("m", 10_000) == pytest.approx(2030, rel=0.01)
    assert sizes.prompt_tokens("m", 200) == pytest.approx(70, rel=0.05)
    assert sizes.prompt_tokens("other", 400) == 100


def test_prompts_of_one_size_give_a_ratio():
    sizes = TokenSizes()
    for _ in range(10):
        sizes.learn_prompt("m", 1000, 500)
    assert sizes.prompt_tokens("m", 2000) == 1000


def test_counts_that_make_no_line_give_a_ratio():
    sizes = TokenSizes()
    sizes.learn_prompt("m", 1000, 500)
    sizes.learn_prompt("m", 10_000, 20)  # an image, say
    assert sizes.prompt_tokens("m", 11_000) == pytest.approx(520, rel=0.05)
    assert sizes.prompt_tokens("m", 0) == 1
    sizes.learn_prompt("m", 0, 5)
    sizes.learn_prompt("n", 5, 0)
    assert sizes.prompt_tokens("n", 400) == 100


def test_tokens_of_an_event_are_learned_and_models_are_bounded():
    sizes = TokenSizes()
    for number in range(MOST + 5):
        sizes.learn_answer(str(number), 10, 25)
        sizes.learn_prompt(str(number), 100, 100)
    assert sizes.per_event("0") == 2.5
    assert sizes.per_event(str(MOST)) == 1.0
    assert sizes.prompt_tokens(str(MOST), 400) == 100
