"""A language model's server with tools and logprobs, in a process of its own, in OpenAI's form.

It prints its address. ``GET /seen`` has the last bodies, how often each was repeated by its client, and how many were
given up. A request with ``tools`` gets two calls, one whose ``max_tokens`` is 9000 a token every 10 ms.
"""

from __future__ import annotations

import asyncio
import json

from aiohttp import web

CALLS = (("call_1", "look", '{"at": "here", "text": "é \\"\\n"}'), ("call_2", "add", '{"first": 1, "second": 2}'))
"""What it calls: id, name and arguments, which come in pieces of five characters."""
WORDS = ((" é", -0.25), ("!", -1.5))
"""What it says otherwise: tokens and their logprobs."""
LIMIT = 10_000
"""Tokens of an answer, from which it refuses."""

seen: dict[str, list] = {"bodies": [], "repeated": []}
left = [0]


def base(body, kind):
    return {"id": "c1", "object": kind, "created": 0, "model": body.get("model", "m"), "system_fingerprint": "s"}


def logprob(token, value):
    other = {"token": "x", "logprob": value - 1, "bytes": [120]}
    return {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": [other]}


def choice(delta=None, *, index=0, reason=None, probabilities=None):
    said = None if probabilities is None else {"content": probabilities, "refusal": None}
    return {"index": index, "delta": delta or {}, "logprobs": said, "finish_reason": reason}


def called(index, **function):
    return {"tool_calls": [{"index": index, **function}]}


def deltas(body):
    """The choices of a stream, one an event."""
    yield choice({"role": "assistant", "content": None if body.get("tools") else ""})
    if body.get("tools"):
        for index, (identity, name, arguments) in enumerate(CALLS):
            yield choice(called(index, id=identity, type="function", function={"name": name, "arguments": ""}))
            for at in range(0, len(arguments), 5):
                yield choice(called(index, function={"arguments": arguments[at : at + 5]}))
        yield choice(reason="tool_calls")
        return
    for token, value in WORDS:
        yield choice({"content": token}, probabilities=[logprob(token, value)] if body.get("logprobs") else None)
    yield choice(reason="stop")


def whole(body):
    message = {"role": "assistant", "content": "".join(token for token, _ in WORDS), "refusal": None}
    if body.get("tools"):
        calls = [
            {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
            for identity, name, arguments in CALLS
        ]
        message |= {"content": None, "tool_calls": calls}
    said = {"content": [logprob(*word) for word in WORDS], "refusal": None} if body.get("logprobs") else None
    reason = "tool_calls" if body.get("tools") else "stop"
    answer = {"index": 0, "message": message, "logprobs": said, "finish_reason": reason}
    usage = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
    return base(body, "chat.completion") | {"choices": [answer], "usage": usage}


def wrong(status, message, param, code):
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return web.json_response({"error": error}, status=status, headers={"x-request-id": "req-7"})


async def chat(request):
    body = await request.json()
    seen["bodies"] = [*seen["bodies"], body][-20:]
    seen["repeated"] = [*seen["repeated"], int(request.headers.get("x-stainless-retry-count", 0))][-20:]
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or 16
    if limit > LIMIT:
        return wrong(400, f"prompt and answer are over {LIMIT} tokens", "max_tokens", "length")
    if not body.get("stream"):
        return web.json_response(whole(body))
    answer = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    await answer.prepare(request)

    async def event(choices, **more):
        said = base(body, "chat.completion.chunk") | {"choices": choices} | more
        await answer.write(b"data: " + json.dumps(said, ensure_ascii=False).encode() + b"\n\n")

    try:
        if limit == 9000:
            for number in range(limit):
                await event([choice({"content": f" {number}"})])
                await asyncio.sleep(0.01)
        for each in deltas(body):
            await event([each])
        if (body.get("stream_options") or {}).get("include_usage"):
            await event([], usage=whole(body)["usage"])
        await answer.write(b"data: [DONE]\n\n")
    except (ConnectionError, asyncio.CancelledError):
        left[0] += 1
        raise
    return answer


async def counts(_):
    return web.json_response(seen | {"left": left[0]})


async def main():
    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/seen", counts)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"127.0.0.1:{runner.addresses[0][1]}", flush=True)  # noqa: T201 - for the test
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
