"""The gate in a whole sidecar: who waits, who is refused, and that nobody is once an answer has begun."""

from __future__ import annotations

import asyncio
import json

import pytest

from carpool.generation.gate import Gate

TARGETS = {"ttft": {"p99": "20s"}, "tpot": {"p99": "1s"}}


def policy(slo=TARGETS, **generation):
    return {"slo": slo, "generation": {"maxRunning": 1, **generation}}


async def queue(chat, *readers):
    """Send requests, and wait after each until it is queued; returns them."""
    sent = []
    for ask in readers:
        before = chat.sidecar.streams.gatekeeper.queued
        sent.append(ask())
        await chat.until(lambda before=before: chat.sidecar.streams.gatekeeper.queued > before)
    return sent


async def test_a_request_waits_until_another_ends(chat):
    await chat.start(policy=policy())
    first = chat.ask()
    call = await chat.called(1)
    (second,) = await queue(chat, chat.ask)
    call.token()
    await chat.until(lambda: first.body)
    assert len(chat.engine.calls) == 1
    call.finish()
    (await chat.called(2)).token().finish()
    assert [(await each).status for each in (first, second)] == [200, 200]
    assert second.body == chat.engine.calls[1].sent


async def test_jobs_go_by_what_token_streams_met_and_missed_except_those_of_batch_priority(chat):
    await chat.start(policy=policy(maxQueuedTokens=20))
    served = chat.ask()
    call = await chat.called(1)
    for headers in ([], [(b"x-carpool-priority", b"batch")]):
        await queue(chat, lambda headers=headers: chat.ask(headers=headers, prompt="a" * 40))
        refused = await chat.ask(headers=headers, prompt="a" * 40)
        assert refused.status == 429
    call.token().finish()
    await served
    await chat.until(lambda: chat.sidecar._seen().met == 1)
    assert chat.sidecar._seen().missed == 1


@pytest.mark.parametrize(("headers", "hits"), [((), 0), ([(b"x-carpool-priority", b"batch")], 1)])
async def test_a_late_answer_of_batch_priority_misses_no_target(chat, headers, hits):
    streams = await chat.start(policy=policy())
    asked = chat.ask(headers=headers)
    call = await chat.called(1)
    (stream,) = streams.under_way
    stream.ticket.arrival -= 100.0
    call.token().finish()
    assert (await asked).status == 200
    ((_, counts),) = dict(streams.models).items()
    assert counts.hits == hits


@pytest.mark.parametrize(
    ("target", "word"), [(b"/v1/chat/completions", ("error", "code")), (b"/generate", ("reason",))]
)
async def test_a_full_queue_refuses_at_arrival_and_says_when_to_come_again(chat, target, word):
    streams = await chat.start(policy=policy(maxQueuedTokens=20))
    chat.ask()
    await chat.called(1)
    await queue(chat, lambda: chat.ask(prompt="a" * 40))
    refused = await chat.ask(target, prompt="a" * 40)
    assert (refused.status, refused.header(b"retry-after")) == (429, b"1")
    found = refused.json
    for step in word:
        found = found[step]
    assert found == "queue-full"
    assert len(chat.engine.calls) == 1
    assert dict(streams.models)["<other>"].ends == {"queue-full": 1}


async def test_a_request_whose_first_token_would_be_late_is_refused_while_it_waits(chat):
    await chat.start(policy=policy({"ttft": {"p99": "30ms"}, "tpot": {"p99": "1s"}}))
    first = chat.ask()
    call = await chat.called(1)
    late = await chat.ask()
    assert (late.status, late.json["error"]["code"], late.header(b"retry-after")) == (429, "ttft", b"1")
    assert len(chat.engine.calls) == 1
    call.token().finish()  # later than its target, too; but it was admitted
    assert (await first).status == 200
    assert first.body == call.sent


async def test_a_deadline_in_the_queue(chat):
    await chat.start(policy=policy())
    chat.ask()
    await chat.called(1)
    late = await chat.ask(headers=[(b"x-request-timeout-ms", b"40")])
    assert late.status in {503, 504}
    assert late.json["error"]["code"] == "deadline"
    assert chat.sidecar.streams.gatekeeper.queued == 0


async def test_a_client_that_leaves_the_queue_never_reaches_the_engine(chat):
    streams = await chat.start(policy=policy())
    chat.ask()
    call = await chat.called(1)
    (gone,) = await queue(chat, chat.ask)
    gone.leave()
    await chat.until(lambda: streams.gatekeeper.queued == 0)
    after = chat.ask()
    call.token().finish()
    (await chat.called(2)).token().finish()
    assert (await after).status == 200
    assert len(chat.engine.calls) == 2


async def test_the_least_served_tenant_is_next(chat):
    await chat.start(policy=policy(tenants={"header": "X-Tenant"}))
    flood = [(b"x-tenant", b"flood")]
    chat.ask(headers=flood, messages="a" * 60_000)
    call = await chat.called(1)
    await queue(
        chat,
        *[lambda number=number: chat.ask(headers=flood, seed=number) for number in range(3)],
        lambda: chat.ask(headers=[(b"x-tenant", b"other")], seed=9),
    )
    call.token().finish(prompt_tokens=15_000)
    assert (await chat.called(2)).asked["seed"] == 9


@pytest.mark.parametrize("low", [{"service_tier": "flex"}, {"headers": [(b"x-carpool-priority", b"batch")]}])
async def test_requests_of_batch_priority_go_last(chat, low):
    await chat.start(policy=policy())
    chat.ask()
    call = await chat.called(1)
    await queue(chat, lambda: chat.ask(seed=1, **low), lambda: chat.ask(seed=2))
    call.token().finish()
    assert (await chat.called(2)).asked["seed"] == 2


async def test_a_fault_of_the_gate_forwards_what_waits(chat, monkeypatch):
    streams = await chat.start(policy=policy())
    chat.ask()
    await chat.called(1)
    await queue(chat, chat.ask)
    monkeypatch.setattr(Gate, "arrive", None)
    chat.ask()
    await chat.called(3)
    assert streams.gatekeeper.faults == 1


async def test_a_new_policy_opens_the_gate(chat, tmp_path):
    path = tmp_path / "sidecar.json"
    path.write_text(chat.world.config(policy=policy()))
    chat.sidecar = await chat.world.sidecar(path.read_text(), path=path)
    chat.client = chat.world.client(chat.sidecar.data.address)
    chat.ask()
    await chat.called(1)
    await queue(chat, chat.ask, chat.ask)
    path.write_text(chat.world.config(policy={"slo": {"latency": {"p99": "5s"}}}))
    chat.sidecar.versions.file.look()
    await chat.called(3)
    assert chat.sidecar.streams.gatekeeper.gate is None


async def test_without_targets_of_tokens_nothing_waits(chat):
    await chat.start(policy={"slo": {"latency": {"p99": "5s"}}})
    for _ in range(3):
        chat.ask()
    await chat.called(3)


async def test_what_a_client_pipelines_is_answered_in_order(chat):
    await chat.start(policy=policy(maxQueuedTokens=1))
    body = json.dumps({"model": "m", "stream": True}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    host, _, port = chat.sidecar.data.address.rpartition(":")
    import asyncio  # noqa: PLC0415

    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(3 * request)
    call = await chat.called(1)
    await chat.until(lambda: chat.sidecar.streams.gatekeeper.queued == 1)
    call.token().finish()
    (await chat.called(2)).token().finish()
    answers = b""
    async with asyncio.timeout(30):
        while answers.count(b"HTTP/1.1 ") < 3 or not answers.endswith(b"}"):
            answers += await reader.read(65536)
    assert [part[:3] for part in answers.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"429"]
    writer.close()


@pytest.mark.parametrize(
    ("fields", "choices"), [({"n": 4}, 4), ({"tools": [{"examples": [{"n": 4}]}]}, 1)], ids=["asked for", "of a tool"]
)
async def test_a_request_holds_the_tokens_of_all_its_choices(chat, fields, choices):
    streams = await chat.start(policy=policy())
    reader = chat.ask(**fields)
    call = (await chat.called(1)).begin()
    for step in range(11):
        for index in range(4):
            call.raw(b'data: {"choices":[{"index":%d,"delta":{"content":"%d"}}]}\n\n' % (index, step))
    await chat.until(lambda: reader.body == call.sent)
    meter = streams.gatekeeper.gate.meter
    (stream,) = streams.under_way
    # Of each choice that is known the first token is cached with the second.
    await chat.until(lambda: meter.kv == stream.ticket.prompt_tokens + 44 - choices)
    assert (meter.decoding, meter.steps, stream.progress.steps) == (
        choices,
        (44 - choices) / choices,
        (44 - choices) / choices,
    )
    call.tokens = 44
    call.finish(prompt_tokens=9)
    await reader
    await chat.until(lambda: not streams.under_way)
    (answer,) = streams.gatekeeper.gate.calibration._answers
    assert (answer.output_tokens, answer.choices) == (44 / choices, choices)
    assert (meter.decoding, meter.kv) == (0, 0)


async def test_tpot_is_that_of_the_longest_choice(chat):
    streams = await chat.start(policy=policy())
    reader = chat.ask(n=2)
    call = (await chat.called(1)).begin()
    text = b'data: {"choices":[{"index":%d,"delta":{"content":"a"},"finish_reason":%s}]}\n\n'
    for step in range(9):
        call.raw(text % (0, b"null"))
        if step < 3:
            call.raw(text % (1, b'"stop"' if step == 2 else b"null"))
        await chat.until(lambda: reader.body == call.sent)
    (stream,) = streams.under_way
    assert stream.progress.steps == pytest.approx(8, abs=0.5)  # pieces that come together are taken for full steps
    meter = streams.gatekeeper.gate.meter
    await chat.until(lambda: meter.steps == stream.progress.steps)
    assert (meter.decoding, meter.sequences) == (1, 1)
    assert meter.kv == pytest.approx(stream.ticket.prompt_tokens + 8, abs=1)
    seconds, steps = stream.progress.last_at - stream.progress.first_at, stream.progress.steps
    call.tokens = 12
    call.finish(prompt_tokens=9)
    await reader
    await chat.until(lambda: not streams.under_way)
    ((_, counts),) = streams.models
    assert counts.tpot.seconds == pytest.approx(seconds / steps)


async def test_an_engine_that_ignores_the_number_of_choices_is_found_out(chat):
    streams = await chat.start(policy=policy())
    for sequences in (4, 1, 1):
        reader = chat.ask(n=4)
        call = await chat.called(1)
        (stream,) = streams.under_way
        assert stream.ticket.choices == sequences
        call.token().token().token().token().token().token().finish()
        await reader
        await chat.until(lambda: not streams.under_way)
        chat.engine.calls.clear()


async def test_an_engine_that_ignores_the_number_of_choices_may_answer_each_prompt_of_a_list(chat):
    streams = await chat.start(policy=policy())
    for fields, sequences in (({"n": 4}, 4), ({"n": 4}, 1), ({"prompt": ["a", "b", "c"], "n": 4}, 3)):
        chat.ask(b"/v1/completions", **fields)
        call = await chat.called(1)
        (stream,) = streams.under_way
        assert stream.ticket.choices == sequences
        call.token().finish()
        await chat.until(lambda: not streams.under_way)
        chat.engine.calls.clear()


async def test_an_engine_that_heeds_the_number_of_choices_again_is_believed(chat):
    # As after an update of the engine, or an answer with an end that was not seen.
    streams = await chat.start(policy=policy())
    text = b'data: {"choices":[{"index":%d,"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n'
    for sequences, ends in ((2, 1), (1, 2), (2, 2)):
        reader = chat.ask(n=2)
        call = await chat.called(1)
        (stream,) = streams.under_way
        assert stream.ticket.choices == sequences
        call.begin()
        for index in range(ends):
            call.raw(text % (index,))
        call.exchange.end()
        await reader
        await chat.until(lambda: not streams.under_way)
        chat.engine.calls.clear()


async def test_tpot_is_that_of_the_longest_choice_without_a_gate_as_well(chat):
    streams = await chat.start(policy={"slo": {"latency": {"p99": "1s"}}})
    reader = chat.ask(n=2)
    call = (await chat.called(1)).begin()
    text = b'data: {"choices":[{"index":%d,"delta":{"content":"a"},"finish_reason":%s}]}\n\n'
    for step in range(9):
        call.raw(text % (0, b"null"))
        if step < 3:
            call.raw(text % (1, b'"stop"' if step == 2 else b"null"))
        await chat.until(lambda: reader.body == call.sent)
    (stream,) = streams.under_way
    assert stream.progress.steps == pytest.approx(8, abs=0.5)


async def test_a_whole_answer_has_the_steps_of_its_longest_choice(chat):
    # The mean has 102 tokens, due after 0.1 s, and the longest 10,000, due after 10 s.
    streams = await chat.start(policy=policy({"ttft": {"p99": "1ms"}, "tpot": {"p99": "1ms"}}))
    reader = chat.ask(stream=False, n=100)
    call = await chat.called(1)
    await asyncio.sleep(0.2)
    choices = [{"index": i, "message": {"content": "" if i else "a" * 9_998}} for i in range(100)]
    body = json.dumps({"choices": choices, "usage": {"prompt_tokens": 9, "completion_tokens": 10_198}}).encode()
    call.exchange.respond(200, [(b"content-type", b"application/json")], body)
    await reader
    await chat.until(lambda: not streams.under_way)
    ((_, counts),) = streams.models
    assert (counts.hits, counts.output_tokens) == (1, 10_198)
    (answer,) = streams.gatekeeper.gate.calibration._answers
    assert (answer.output_tokens, answer.choices) == (102, 100)
    assert answer.totals.row[0] == pytest.approx(9_999)


async def test_a_class_has_the_targets_that_its_header_names(chat):
    slo = {"ttft": {"p99": "20s"}, "classes": [{"priority": "gold", "tpot": {"p99": "1us"}}]}
    streams = await chat.start(policy={"slo": slo})
    gold = chat.ask(headers=[(b"x-carpool-priority", b"gold")])
    first = await chat.called(1)
    other = chat.ask(headers=[(b"x-carpool-priority", b"silver")])
    await chat.until(lambda: streams.gatekeeper.queued == 1)  # it would slow gold
    first.token()
    await chat.until(lambda: gold.body == first.sent)
    first.token().finish()
    await gold
    (await chat.called(2)).token().token().finish()
    await other
    await chat.until(lambda: not streams.under_way)
    ((_, counts),) = streams.models
    assert counts.ends == {"stop": 2}
    assert counts.hits == 1, "gold's second token came later than a microsecond"
