"""Run by `check_tools.py` with the `openai` package: tools, logprobs, errors, repeats, a stream that is given up."""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.request

import openai

MESSAGES = [{"role": "user", "content": 'Look and add, please: é "\n'}]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("look", "add")
]
CALLS = [("look", {"at": "here", "text": 'é "\n'}), ("add", {"first": 1, "second": 2})]
PATIENCE = 30.0


def main(url: str, engine: str) -> None:
    """Use the client as its users do."""

    def seen() -> dict:
        with urllib.request.urlopen(f"{engine}/seen") as answer:  # noqa: S310 - 127.0.0.1
            return json.load(answer)

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    chat = client.chat.completions
    # 1. Tools: two calls whose arguments come in pieces, put together by the client; and whole
    with chat.stream(model="m", messages=MESSAGES, tools=TOOLS, stream_options={"include_usage": True}) as stream:
        names = [event.name for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert names == ["look", "add"], names
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == CALLS, calls
    assert (final.choices[0].finish_reason, final.usage.completion_tokens) == ("tool_calls", 2), final
    whole = chat.create(model="m", messages=MESSAGES, tools=TOOLS, tool_choice="required", parallel_tool_calls=True)
    calls = whole.choices[0].message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == CALLS, calls
    assert seen()["bodies"][-1]["tools"] == TOOLS
    # 2. What was called goes back
    answers = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in calls]
    again = chat.create(model="m", messages=[*MESSAGES, whole.choices[0].message, *answers])
    assert again.choices[0].message.content == " é!", again
    assert [one["role"] for one in seen()["bodies"][-1]["messages"]] == ["user", "assistant", "tool", "tool"]
    # 3. Logprobs, in a stream and whole
    asked = {"model": "m", "messages": MESSAGES, "logprobs": True, "top_logprobs": 1}
    chunks = [chunk.choices[0] for chunk in chat.create(**asked, stream=True)]
    tokens = [one for chunk in chunks if chunk.logprobs for one in chunk.logprobs.content]
    for found in (tokens, chat.create(**asked).choices[0].logprobs.content):
        assert [(one.token, one.logprob) for one in found] == [(" é", -0.25), ("!", -1.5)], found
        assert [one.top_logprobs[0].token for one in found] == ["x", "x"], found
    # 4. The engine's own errors: read, with the request's name, and not repeated
    asked_before = len(seen()["bodies"])
    try:
        client.with_options(max_retries=3).chat.completions.create(model="m", messages=MESSAGES, max_tokens=20_000)
    except openai.BadRequestError as error:
        assert (error.code, error.param, error.request_id) == ("length", "max_tokens", "req-7"), error  # noqa: PT017 - no pytest
    else:
        raise AssertionError("it was not refused")
    assert len(seen()["bodies"]) == asked_before + 1
    # 5. A refusal by the gate is repeated after `Retry-After`, while another request has the engine
    with chat.create(model="m", messages=MESSAGES, max_tokens=9000, stream=True) as long:
        next(iter(long))
        left = seen()["left"]
        closing = threading.Timer(1.5, long.close)
        closing.start()
        began = time.monotonic()
        patient = client.with_options(max_retries=10).chat.completions
        assert patient.create(model="m", messages=MESSAGES).choices[0].message.content == " é!"
        assert time.monotonic() - began > 1.0
        closing.join()
    assert seen()["repeated"][-1] > 0, seen()["repeated"]
    # 6. The stream that was given up ended at the engine, too
    until = time.monotonic() + PATIENCE
    while seen()["left"] != left + 1:
        assert time.monotonic() < until, "the engine goes on"
        time.sleep(0.05)


main(*sys.argv[1:])
