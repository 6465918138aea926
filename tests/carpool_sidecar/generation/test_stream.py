"""Requests to language models through a whole sidecar: bytes pass unchanged, and each side hears of the other's end."""

from __future__ import annotations

import asyncio
import json

import pytest

from carpool_sidecar.config import settings
from carpool_sidecar.http1.client.errors import UpstreamError

TOKENS = {"slo": {"ttft": {"p99": "20s"}, "tpot": {"p99": "1s"}}}


async def test_a_stream_passes_byte_for_byte_while_it_comes(chat):
    streams = await chat.start()
    reader = chat.ask()
    call = await chat.called(1)
    for text in ("Hi", " \u00e9\u4e2d", "\U0001f600", "\n\ndata: {}"):
        call.token(text)
        await chat.until(lambda: reader.body == call.sent)  # each piece before the next is made
    call.finish(prompt_tokens=9)
    await reader
    assert reader.body == call.sent
    assert (reader.status, reader.header(b"content-type")) == (200, b"text/event-stream; charset=utf-8")
    ((model, counts),) = streams.models
    assert (model, counts.ends, counts.prompt_tokens, counts.output_tokens) == ("m", {"stop": 1}, 9, 4)
    assert [sum(histogram.counts) for histogram in (counts.ttft, counts.tpot, counts.gaps)] == [1, 1, 3]
    assert not streams.under_way


async def test_utf8_that_is_cut_anywhere_passes_and_its_tokens_are_those_of_the_usage(chat):
    streams = await chat.start()
    reader = chat.ask()
    call = await chat.called(1)
    call.begin()
    event = 'data: {"choices":[{"delta":{"content":"\u4e2d\u6587"}}]}\r\n\r\n'.encode()
    for at in range(0, len(event), 5):  # an engine that flushes in the middle of a character
        call.raw(event[at : at + 5])
    call.tokens = 5  # which it held back
    call.finish("length", prompt_tokens=3)
    await reader
    assert reader.body == call.sent
    counts = streams.models.known("m")
    assert (counts.output_tokens, counts.ends) == (5, {"length": 1})
    assert streams.sizes.per_event("m") == 5.0


async def test_whole_answers_are_counted_too(chat):
    streams = await chat.start()
    reader = chat.ask(stream=False)
    (await chat.called(1)).whole(12, prompt_tokens=40)
    await reader
    assert reader.body == chat.engine.calls[0].sent
    counts = streams.models.known("m")
    assert (counts.prompt_tokens, counts.output_tokens, counts.ends) == (40, 12, {"length": 1})
    assert sum(counts.durations.counts) == 1
    assert sum(counts.ttft.counts) == 0


async def test_the_memory_of_a_prompt_is_free_once_its_answer_begins(chat):
    streams = await chat.start()
    reader = chat.ask(prompt="a" * 500_000)
    call = await chat.called(1)
    (stream,) = streams.under_way
    assert chat.sidecar.data.server.buffered_bytes > 500_000
    call.token()
    await chat.until(lambda: reader.body == call.sent)
    assert (stream.exchange.body, chat.sidecar.data.server.buffered_bytes) == (b"", 0)
    call.finish()
    await reader
    assert chat.sidecar.data.server.buffered_bytes == 0


async def test_compressed_events_pass_and_are_taken_for_a_whole_answer(chat):
    streams = await chat.start(policy=TOKENS)
    reader = chat.ask()
    call = await chat.called(1)
    call.exchange.start(200, [(b"content-type", b"text/event-stream"), (b"content-encoding", b"gzip")], None)
    call.raw(b"\x1f\x8b\x08")
    await chat.until(lambda: reader.body == call.sent)
    (stream,) = streams.under_way
    assert not stream.streams
    call.raw(b"\x00" * 397)
    call.exchange.end()
    await reader
    assert streams.models.known("m").output_tokens == 100  # by its bytes


async def test_a_client_that_leaves_ends_the_engines_work(chat):
    streams = await chat.start()
    reader = chat.ask()
    call = await chat.called(1)
    call.token()
    await chat.until(lambda: reader.body)
    reader.leave()
    await chat.until(lambda: call.token() and chat.engine.left == 1)  # heard of at the next write
    assert not streams.under_way
    assert streams.models.known("m").ends == {"cancelled": 1}


async def test_a_client_that_leaves_before_the_first_token_ends_it_too(chat):
    streams = await chat.start()
    reader = chat.ask()
    await chat.called(1)
    reader.leave()
    await chat.until(lambda: chat.engine.left == 1)
    assert not streams.under_way


async def test_an_engine_that_dies_cuts_its_stream_and_one_that_is_gone_is_answered_for(chat):
    streams = await chat.start()
    reader = chat.ask()
    call = await chat.called(1)
    call.token()
    await chat.until(lambda: reader.body)
    await chat.world.model.die()
    with pytest.raises(UpstreamError):
        await reader
    late = await chat.ask()
    assert (late.status, late.json["reason"]) == (503, "upstream-refused")
    assert (late.json["error"]["code"], late.json["error"]["type"]) == ("upstream-refused", "server_error")
    assert late.json["error"]["message"]
    anthropics = await chat.ask(b"/v1/messages")
    assert (anthropics.status, anthropics.json["error"]["type"]) == (503, "api_error")
    assert streams.models.known("m").ends == {"failed": 3}
    assert not streams.under_way


async def test_what_is_forwarded_may_be_silent_for_longer_than_inference(chat, monkeypatch):
    monkeypatch.setattr(settings, "SILENCE", 0.05)
    await chat.start()
    answers = [chat.ask(stream=False), chat.ask(b"/v1/audio/speech")]
    await chat.called(2)
    silent = await chat.ask(b"/v1/models/m:predict", body=b'{"instances": [[1]]}')
    assert silent.status == 504
    for call in chat.engine.calls[:2]:
        call.whole(3)
    assert [(await answer).status for answer in answers] == [200, 200]


@pytest.mark.parametrize("chunked", [False, True])
async def test_inference_that_is_too_large_to_be_batched_may_be_silent_for_no_longer(chat, monkeypatch, chunked):
    monkeypatch.setattr(settings, "SILENCE", 0.05)
    await chat.start(bodies={"maxRequest": "4Ki"})
    body, framing = b'{"instances": [[1]]}' + b" " * 5000, None
    if chunked:
        body, framing = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body), (b"transfer-encoding", b"chunked")
    assert (await chat.ask(b"/v1/models/m:predict", body=body, framing=framing)).status == 504


async def test_what_waits_for_a_connection_of_a_server_that_hangs_is_answered_sooner(chat, monkeypatch):
    monkeypatch.setattr(settings, "SILENCE", 0.05)
    await chat.start(upstream={"url": f"http://127.0.0.1:{chat.world.model.port}", "maxForwarded": 1})
    hangs = chat.ask(b"/v1/audio/speech")
    call = await chat.called(1)
    waits = await chat.ask(b"/v1/audio/speech")
    assert (waits.status, "no connection to the upstream was free within 0.05 s" in str(waits.json)) == (504, True)
    call.whole(3)
    assert (await hangs).status == 200


async def test_prompts_that_all_have_an_image_teach_the_tokens_of_their_text(chat):
    def tokens(words):
        return 1500 + 5 * words // 13

    def content(words):
        image = {"type": "image_url", "image_url": {"url": "http://images/1.png"}}
        return [{"role": "user", "content": [image, {"type": "text", "text": "word " * words}]}]

    streams = await chat.start()
    for number, words in enumerate((40, 400, 4000, 40, 4000, 400), 1):
        reader = chat.ask(messages=content(words))
        (await chat.called(number)).token().finish(prompt_tokens=tokens(words))
        await reader
    chat.ask(messages=content(4000))
    await chat.called(7)
    (stream,) = streams.under_way
    assert stream.ticket.prompt_tokens == pytest.approx(tokens(4000), rel=0.1)


async def test_a_timeout_that_is_set_is_for_all(chat):
    await chat.start(upstream={"url": f"http://127.0.0.1:{chat.world.model.port}", "timeout": "50ms"})
    answer = await chat.ask(stream=False)
    assert (answer.status, answer.json["error"]["code"]) == (504, "upstream-timeout")


async def test_errors_of_the_engine_pass_and_are_no_answers(chat):
    streams = await chat.start()
    reader = chat.ask(stream=False)
    (await chat.called(1)).whole(0, status=400)
    assert (await reader).status == 400
    counts = dict(streams.models)["<other>"]  # a model that never answered: callers make names up
    assert (counts.ends, counts.output_tokens, sum(counts.durations.counts)) == ({"400": 1}, 0, 0)


@pytest.mark.parametrize(
    "target",
    [b"/generate_stream", b"/v2/models/m/generate_stream", b"/completion", b"/v1/responses", b"/openai/v1/completions"],
)
async def test_other_apis_pass_as_well(chat, target):
    streams = await chat.start()
    reader = chat.ask(target, stream=True)
    call = await chat.called(1)
    call.exchange.start(200, [(b"content-type", b"text/event-stream")], None)
    text = {b"/v1/responses": b"delta", b"/v2/models/m/generate_stream": b"text_output"}.get(target, b"text")
    for _ in range(3):
        call.raw(b'event: x\ndata: {"%b":"a"}\n\n' % text)
    call.exchange.end()
    await reader
    assert reader.body == call.sent
    ((_, counts),) = streams.models
    assert counts.output_tokens == 3


async def test_a_body_that_is_too_large_to_be_read_is_forwarded(chat):
    streams = await chat.start(bodies={"maxRequest": "1000", "maxBuffered": "300Mi"})
    reader = chat.ask(messages="x" * 5000)
    (await chat.called(1)).token().finish()
    assert (await reader).status == 200
    assert not list(streams.models)


async def test_a_deadline_that_the_caller_names_ends_a_stream_under_way(chat):
    streams = await chat.start(policy=TOKENS)
    reader = chat.ask(headers=[(b"x-request-timeout-ms", b"30")])
    answer = await reader
    assert (answer.status, answer.json["error"]["code"]) == (504, "deadline")
    await chat.until(lambda: chat.engine.left == len(chat.engine.calls))
    assert not streams.under_way


async def test_without_targets_no_deadline_ends_a_stream(chat):
    await chat.start()
    reader = chat.ask(headers=[(b"x-request-timeout-ms", b"0")])
    (await chat.called(1)).token().finish()
    assert (await reader).status == 200


async def test_a_drain_waits_for_streams_in_flight(chat):
    await chat.start(shutdown={"lame": "0s", "limit": "20s"}, policy=TOKENS)
    reader = chat.ask()
    call = await chat.called(1)
    call.token()
    await chat.until(lambda: reader.body)
    draining = asyncio.create_task(chat.sidecar.drain())
    await chat.until(lambda: not chat.sidecar.data.server._listeners)
    assert not draining.done()
    call.token().finish()
    await reader
    await draining
    assert reader.body == call.sent


async def test_a_fault_in_looking_changes_no_byte(chat, monkeypatch, caplog):
    streams = await chat.start(policy=TOKENS)
    monkeypatch.setattr(streams, "tokens", None)
    reader = chat.ask()
    call = await chat.called(1)
    call.token().token().finish()
    await reader
    assert reader.body == call.sent
    assert streams.faults == 1
    assert not streams.under_way
    assert "without being looked at" in caplog.text
    monkeypatch.setattr(streams, "arrive", None)
    reader = chat.ask()
    (await chat.called(2)).token().finish()
    assert (await reader).status == 200


async def test_headers_and_body_reach_the_engine_as_they_came(chat):
    await chat.start(policy=TOKENS)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "\u00e9"}]}, indent=3).encode()
    reader = chat.ask(body=body, headers=[(b"Authorization", b"Bearer x"), (b"X-Mixed-Case", b"1")])
    call = await chat.called(1)
    assert bytes(call.exchange.body) == body
    assert {(b"Authorization", b"Bearer x"), (b"X-Mixed-Case", b"1")} <= set(call.exchange.headers)
    call.whole(1)
    await reader
