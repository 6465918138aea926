from __future__ import annotations

import json
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool_sidecar.llm.requests import CHAT, TEXT, BadRequest, read

HELLO = [{"role": "user", "content": "Hello"}]


def asked(path=CHAT, **fields):
    if path == CHAT:
        fields = {"messages": HELLO, **fields}
    return read(path, json.dumps(fields).encode(), "m", random.Random(7))


def test_a_chat():
    found = asked(model="m", stream=True, stream_options={"include_usage": True}, user="x", unknown={"a": 1})
    assert (found.chat, found.stream, found.include_usage, len(found.choices)) == (True, True, True, 1)
    (add,) = found.choices
    assert (add.messages, add.prompt, add.max_tokens) == (HELLO, "", None)
    assert (add.sampling.temperature, add.sampling.top_p, add.sampling.logprobs) == (1.0, 1.0, False)


def test_parts_of_text_are_one():
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert asked(messages=[{"role": "user", "content": content}]).choices[0].messages[0]["content"] == "ab"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts(prompt, prompts):
    assert [add.prompt for add in asked(TEXT, prompt=prompt).choices] == prompts


def test_completions_have_sixteen_tokens_unless_more_are_asked_for():
    assert asked(TEXT, prompt="a").choices[0].max_tokens == 16
    assert asked(TEXT, prompt="a", max_tokens=3).choices[0].max_tokens == 3
    assert asked(max_tokens=3, max_completion_tokens=4).choices[0].max_tokens == 4


def test_copies_differ_by_their_seeds():
    assert [add.sampling.seed for add in asked(n=3, seed=5).choices] == [5, 6, 7]
    assert len({add.sampling.seed for add in asked(n=3).choices}) == 3
    assert asked(n=3).per_prompt == 3


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"messages": []}, "messages", "give at least one"),
        ({"messages": "x"}, "messages", "expected `array | null`"),
        ({"messages": [{"content": "x"}]}, "messages", "missing required field `role`"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "reads text only"),
        ({"temperature": 2.5}, "temperature", "give one from 0 to 2"),
        ({"temperature": "hot"}, "temperature", "expected `float | null`"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"n": 0}, "n", "from 1 to 128"),
        ({"n": 129}, "n", "from 1 to 128"),
        ({"max_tokens": 0}, "max_tokens", "give one from 1"),
        ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
        ({"stop": [""]}, "stop", "none of them empty"),
        ({"stop": ["x"] * 17}, "stop", "up to 16"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        ({"functions": [{"name": "look"}]}, "functions", "not supported"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs", "not supported"),
        ({"modalities": ["text", "audio"]}, "modalities", "not supported"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}]}, "messages", "tools"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "x"}}]}, "messages", "tools"),
        ({"messages": [{"role": "tool", "tool_call_id": "x", "content": "3"}]}, "messages", "tools"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs", "more than the chosen token's"),
    ],
)
def test_what_is_wrong_is_named(fields, param, text):
    with pytest.raises(BadRequest, match=re.escape(text)) as caught:
        asked(**fields)
    assert (caught.value.param, caught.value.status) == (param, 400)


def test_many_choices_of_a_long_prompt_are_refused():
    long = [{"role": "user", "content": "a" * 1_000_000}]
    assert len(asked(messages=long, n=16).choices) == 16
    with pytest.raises(BadRequest, match="n is 128, with a body of 1000") as caught:
        asked(messages=long, n=128)
    assert (caught.value.param, caught.value.status) == ("n", 400)


def test_another_model_is_not_here():
    with pytest.raises(BadRequest, match="no model 'gpt' here; there is 'm'") as caught:
        asked(model="gpt")
    assert caught.value.status == 404


@pytest.mark.parametrize("prompt", [None, "", [], [[]] * 200, [1, "a"], [["a"]], [{}], [True], [-1], [1 << 80]])
def test_no_prompt(prompt):
    with pytest.raises(BadRequest):
        asked(TEXT, prompt=prompt)


def test_what_is_left_out_may_be_null_too():
    nulls = dict.fromkeys(("max_tokens", "n", "stop", "temperature", "tools", "stream", "response_format", "logprobs"))
    assert asked(**nulls).choices[0].sampling.temperature == 1.0
    assert asked(tools=[], tool_choice="none", response_format={"type": "text"}).chat


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
_names = st.sampled_from(
    ["model", "messages", "prompt", "max_tokens", "n", "stop", "seed", "temperature", "logprobs", "stream_options"]
)


@given(st.sampled_from([CHAT, TEXT]), st.binary(max_size=40) | st.dictionaries(_names, _json, max_size=6))
def test_any_body_is_read_or_refused(path, body):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        assert read(path, body, "m", random.Random(0)).choices
    except BadRequest as error:
        assert str(error)  # noqa: PT017 - either is right
