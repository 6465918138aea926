from __future__ import annotations

import pytest

from carpool_sidecar.generation.answer_reader import AnswerReader
from carpool_sidecar.generation.answers import Ending
from carpool_sidecar.generation.requests import Api

EVENTS = [(b"Content-Type", b"text/event-stream; charset=utf-8")]
TOKEN = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
LAST = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}],"usage":{"completion_tokens":2}}\n\n'


def read(*chunks, status=200, headers=EVENTS, several=False):
    answer = AnswerReader()
    answer.begin(status, headers, Api.OPENAI, several=several)
    return answer, [answer.add(chunk) for chunk in chunks]


def test_events_with_tokens_are_counted_as_they_pass():
    answer, counts = read(TOKEN, TOKEN[:9], TOKEN[9:] + TOKEN, LAST)
    assert (answer.in_events, counts) == (True, [1, 0, 2, 0])
    assert answer.ending() == Ending(None, 2, "stop")
    assert answer.size == 3 * len(TOKEN) + len(LAST)


def test_the_ends_of_several_choices_are_counted():
    assert read(TOKEN, LAST, LAST, several=True)[0].choices_ended == 2
    assert read(TOKEN, LAST, LAST)[0].choices_ended == 0


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (200, [(b"content-type", b"application/json")]),
        (200, [*EVENTS, (b"content-encoding", b"gzip")]),
        (503, EVENTS),
    ],
)
def test_what_is_not_a_readable_stream_has_no_events(status, headers):
    answer, counts = read(TOKEN, status=status, headers=headers)
    assert (answer.in_events, answer.choices_ended, counts) == (False, None, [0])
    assert not answer.begins(TOKEN)
    assert answer.succeeded is (status == 200)


def test_the_choices_of_a_whole_answer_are_compared():
    body = b'{"choices":[{"text":"%b"},{"text":"%b"}]}' % (b"a" * 28, b"a" * 8)  # with their quotes 30 and 10
    answer, _ = read(body, headers=[])
    assert answer.longest(2) == 1.0, "nothing was kept"
    answer.keep(body)
    assert answer.longest(2) == 1.5
