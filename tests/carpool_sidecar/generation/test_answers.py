import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool_sidecar.generation.answers import KEPT, LONGEST_EVENT, Ending, Ends, Events, ending, longest
from carpool_sidecar.generation.requests import Api


def chat(text):
    return json.dumps({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})


OPENING = '{"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}'
CLOSING = '{"choices":[{"delta":{},"finish_reason":"stop"}]}'


@given(
    st.lists(st.text(min_size=1), max_size=8),
    st.sampled_from(["\n", "\r\n"]),
    st.lists(st.integers(0, 2000), max_size=20),
)
def test_tokens_are_counted_wherever_a_stream_is_cut(texts, line, cuts):
    events = [OPENING, *map(chat, texts), CLOSING, "[DONE]"]
    whole = "".join(f"data: {event}{line}{line}" for event in events).encode()
    edges = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    found = Events(Api.OPENAI)
    assert sum(found.feed(whole[a:b]) for a, b in pairwise(edges)) == len(texts)


@given(st.integers(0, 3 * KEPT), st.lists(st.integers(0, 3 * KEPT), max_size=20))
def test_both_ends_are_kept_wherever_an_answer_is_cut(size, cuts):
    whole = bytes(at % 251 for at in range(size))
    ends = Ends()
    for a, b in pairwise(sorted({0, size, *(cut for cut in cuts if cut < size)})):
        ends.add(whole[a:b])
    assert ends.size == size
    assert ends.text() == (whole if size <= 2 * KEPT else whole[:KEPT] + b"\0" + whole[-KEPT:])


@pytest.mark.parametrize(
    ("api", "event", "tokens"),
    [
        (Api.OPENAI, '{"choices":[{"text":" a","logprobs":null}]}', 1),
        (Api.OPENAI, '{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{"}}]}}]}', 1),
        (Api.OPENAI, '{"choices":[{"delta":{"reasoning_content":"hm"}}]}', 1),
        (Api.OPENAI, '{"choices":[{"delta":{"content":"a"},"logprobs":{"content":[{"token":"a"}]}}]}', 1),
        (Api.OPENAI, '{"choices":[],"usage":{"completion_tokens":3}}', 0),
        (Api.TGI, '{"token":{"id":5,"text":" a","special":false},"generated_text":null}', 1),
        (Api.LLAMA, '{"content":" a","tokens":[5],"stop":false}', 1),
        (Api.LLAMA, '{"content":"","tokens":[],"stop":true,"tokens_predicted":3}', 0),
        (Api.TRITON, '{"model_name":"m","text_output":" a"}', 1),
        (Api.RESPONSES, '{"type":"response.output_text.delta","delta":" a"}', 1),
        (Api.RESPONSES, '{"type":"response.output_text.done","text":"all of it"}', 0),
    ],
)
def test_events_with_tokens(api, event, tokens):
    assert Events(api).feed(f"data: {event}\n\n".encode()) == tokens


@pytest.mark.parametrize(
    ("api", "chunk", "begins"),
    [
        (Api.OPENAI, OPENING, True),
        (Api.OPENAI, '{"choices":[{"delta":{"tool_calls":[{"function":{"name":"find","arguments":""}}]}}]}', True),
        (Api.OPENAI, '{"choices":[],"prompt_progress":{"total":900,"processed":300}}', False),
        (Api.RESPONSES, '{"type":"response.created"}', False),
        (Api.MESSAGES, '{"type":"message_start"}', False),
    ],
)
def test_an_event_without_text_shows_that_the_prompt_is_computed(api, chunk, begins):
    found = Events(api)
    piece = f"data: {chunk}\n\n".encode()
    assert (found.feed(piece), found.begins(piece)) == (0, begins)
    assert not found.begins(b": ping\n\n")
    assert found.begins(b": ping\n\n" + piece) == begins


def test_comments_have_no_tokens_and_events_without_end_take_no_memory():
    found = Events(Api.OPENAI)
    assert found.feed(b": ping\n\n") == 0
    for _ in range(100):
        assert found.feed(b"data: " + b"x" * 50_000) == 0
    assert len(found._rest) <= LONGEST_EVENT + 50_006
    assert found.feed(b"\n\n" + f"data: {chat('a')}\n\n".encode()) == 1


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ('{"choices":[{"finish_reason":"stop"}],"usage":{"prompt_tokens":5,"completion_tokens":7}}', (5, 7, "stop")),
        ('"status":"incomplete","usage":{"input_tokens":5,"output_tokens":7,"details":{"a":1}},"user":null}',
         (5, 7, "length")),
        ('"stop_type":"limit","tokens_predicted":7,"tokens_evaluated":5,"timings":{"prompt_n":1}}', (5, 7, "length")),
        ('"finish_reason":"tool_calls"}],"timings":{"prompt_n":5,"predicted_n":7}}', (5, 7, "stop")),
        ('{"details":{"finish_reason":"eos_token","generated_tokens":7,"input_length":5}}', (5, 7, "stop")),
        ('"finish_reason":"content_filter"', (None, None, "other")),
        ('"meta_info":{"finish_reason":{"type":"length","length":7},"prompt_tokens":5,"completion_tokens":7}}',
         (5, 7, "length")),
        ('"meta_info":{"completion_tokens":7,"prompt_tokens":5,"finish_reason":{"type": "stop"}}}\n\ndata: [DONE]\n\n',
         (5, 7, "stop")),
        ('"delta":{"content":"\\"usage\\": {\\"prompt_tokens\\": 1}"},"finish_reason":null', (None, None, "")),
        ('"usage":{"prompt_tokens":5,', (None, None, "")),
        ('"usage":{"prompt_tokens":true,"completion_tokens":-1}', (None, None, "")),
        ('"usage":null', (None, None, "")),
        ('data: {"error":{"message":"engine died","code":500}}\n\ndata: [DONE]\n\n', (None, None, "error")),
        ('event: error\ndata: {"type":"error","error":{"type":"api_error"}}\n\n', (None, None, "error")),
        ('\ndata: {"error":"overloaded","error_type":"generation"}\n\n', (None, None, "error")),
        ('{"status":"failed","error":{"code":"x"},"usage":null}', (None, None, "error")),
        ('{"output":[{"status":"completed"}],"status":"completed","error":null}', (None, None, "stop")),
        ('{"finish_reason":"stop","stop_reason":"max_tokens"}', (None, None, "stop")),
        ('"delta":{"content":"\\ndata: {\\"error\\":{"},"finish_reason":"stop"', (None, None, "stop")),
        ('"tokens_predicted":12', (None, None, "")),  # cut within the number
        ("\ufffd", (None, None, "")),
    ],
)  # fmt: skip
def test_the_end_says_how_much_it_was(tail, expected):
    assert ending(tail.encode()) == Ending(*expected)


def test_tgi_says_it_in_headers():
    headers = [(b"X-Prompt-Tokens", b"5"), (b"x-generated-tokens", b"7"), (b"x-total-time", b"9")]
    assert ending(b'{"generated_text":"a"}', headers) == Ending(5, 7, "")


def choice(text, **members):
    return {"index": 0, "message": {"role": "assistant", "content": text, **members}, "finish_reason": "stop"}


@pytest.mark.parametrize(
    ("choices", "over_the_mean"),
    [
        ([choice("a" * 98), choice("a" * 28), choice("a" * 28)], 100 * 3 / 160),
        ([{"text": "a" * 58}, {"text": "a" * 18}, {"text": "a" * 18}], 60 * 3 / 100),
        ([choice(None, reasoning="a" * 94), choice("a" * 28), choice("a" * 68)], 100 * 3 / 200),
        ([choice("a" * 98), choice("a" * 28)], 1.0),  # fewer than were computed
        ([choice("a"), choice("a"), {"message": None}], 1.0),
        ([{}, {}, {}], 1.0),
    ],
    ids=["chat", "completion", "reasoning", "two of three", "no message", "nothing"],
)
def test_the_longest_choice_of_a_whole_answer(choices, over_the_mean):
    body = json.dumps({"id": "x", "choices": choices, "usage": {"completion_tokens": 9}}).encode()
    assert longest(body, 3) == pytest.approx(over_the_mean)
    assert longest(body[:-20], 3) == 1.0  # cut
    assert longest(b"\x1f\x8b" + body, 3) == 1.0
