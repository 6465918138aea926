from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack

import pytest
from fake_engine import DONE, LAST, USAGE, event, fake_engine

from carpool_cli.load.streaming import Answer, StreamGenerator


def fed(*pieces, start=1.0):
    answer = Answer()
    for i, piece in enumerate(pieces):
        answer.feed(piece, start + i)
    return answer


def test_chunks_with_text_are_timed_and_others_are_not():
    answer = fed(event(""), event("a"), event("b"), event(), event("c"), LAST, USAGE, DONE)
    assert (answer.first, answer.last, answer.gaps) == (2.0, 5.0, [1.0, 2.0])
    assert answer.complete
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 9)


def test_events_may_be_cut_anywhere():
    whole = event("a") + event("b") + LAST
    answer = Answer()
    for i in range(len(whole)):
        answer.feed(whole[i : i + 1], float(i + 1))
    assert (answer.chunks, answer.complete) == (2, True)
    assert answer.last == len(event("a") + event("b")) - 1


def test_reasoning_and_tool_calls_count_as_text():
    chunk = b'data: {"choices": [{"delta": {"role": "assistant", "%b": "x"}}]}\n'
    assert fed(chunk % b"reasoning_content").chunks == 1
    assert fed(chunk % b"tool_calls").chunks == 1
    assert fed(b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n').chunks == 0


def test_comments_and_named_events_are_passed_over():
    assert fed(b": ping\n\nevent: message\n" + event("a")).chunks == 1


async def recorded(model, count=3, silence=30.0):
    with fake_engine() as engine:
        bodies = [b'{"model": "%b"}' % model.encode()] * count
        generator = StreamGenerator(
            "127.0.0.1", engine.port, "/v1/completions", bodies, [0.0] * count, timeout=silence, headers=[(b"a", b"b")]
        )
        recording = await generator.run()
        assert all(b"a: b" in head.lower() for _, _, head in engine.seen)
        return recording


@pytest.mark.parametrize(
    ("model", "tokens"), [("good", (7, 9)), ("uncounted", (0, 2)), ("text", (0, 1)), ("until-the-end", (7, 9))]
)
async def test_a_complete_answer_is_one_whichever_way_it_ends(model, tokens):
    recording = await recorded(model)
    assert len(recording.streams) == 3
    for each in recording.streams:
        assert (each.failure, each.prompt_tokens, each.output_tokens) == ("", *tokens)
        assert 0 < each.first <= each.last
        assert each.ttft == each.first


@pytest.mark.parametrize(
    ("model", "failure", "complaint"),
    [
        ("full", "429", "too many"),
        ("cut", "connection lost", ""),
        ("error", "error in the stream", "out of memory"),
        ("garbled", "error in the stream", "does not read"),
        ("plain", "no complete stream of events", "{}"),
        ("empty", "no complete stream of events", "data"),
    ],
)
async def test_what_is_no_answer_is_named(model, failure, complaint):
    for each in (await recorded(model)).streams:
        assert each.failure == failure
        assert complaint in each.complaint


async def test_silence_is_a_failure_after_the_timeout():
    recording = await recorded("silent", silence=0.01)
    assert [each.failure for each in recording.streams] == ["timeout"] * 3


async def test_nobody_there_is_a_failure_for_each():
    generator = StreamGenerator("127.0.0.1", 1, "/", [b"{}"], [0.0], timeout=5.0, headers=[])
    (each,) = (await generator.run()).streams
    assert each.failure


async def test_a_stop_does_not_wait_for_a_server_that_accepts_no_connection():
    with socket.socket() as full, ExitStack() as others:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        # The first fills the queue of connections, the next get no answer to their SYN.
        for _ in range(3):
            other = others.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(full.getsockname())
        generator = StreamGenerator(*full.getsockname(), "/", [b"{}"] * 2, [0.0, 0.0], timeout=3600.0, headers=[])
        running = asyncio.create_task(generator.run())
        while generator.under_way < 2:  # noqa: ASYNC110 - the generator has no event for it
            await asyncio.sleep(0)
        generator.stop()
        # Only a guard: without the connections being given up, it would last for the hour.
        recording = await asyncio.wait_for(running, 30.0)
    assert (recording.streams, recording.left_out) == ([], 2)
