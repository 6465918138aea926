"""Run by `check_tools.py` with `litellm`: tools, logprobs, errors, a stream that is given up."""

from __future__ import annotations

import json
import sys
import time
import urllib.request

import litellm

MESSAGES = [{"role": "user", "content": "Look and add, please."}]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("look", "add")
]
CALLS = [("look", {"at": "here", "text": 'é "\n'}), ("add", {"first": 1, "second": 2})]
PATIENCE = 30.0


def main(url: str, engine: str) -> None:
    """Use it as its users do."""

    def left() -> int:
        with urllib.request.urlopen(f"{engine}/seen") as answer:  # noqa: S310 - 127.0.0.1
            return json.load(answer)["left"]

    def ask(**fields: object) -> object:
        served = {"model": "openai/m", "api_base": f"{url}/v1", "api_key": "none", "num_retries": 0, "max_retries": 0}
        return litellm.completion(**served, messages=MESSAGES, **fields)

    # 1. Tools, in pieces and whole
    built = litellm.stream_chunk_builder(list(ask(tools=TOOLS, stream=True)), messages=MESSAGES)
    for answer in (built, ask(tools=TOOLS)):
        choice = answer.choices[0]
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
        assert (calls, choice.finish_reason) == (CALLS, "tool_calls"), choice
    # 2. Logprobs
    found = ask(logprobs=True, top_logprobs=1, allowed_openai_params=["logprobs", "top_logprobs"])
    tokens = found.choices[0].logprobs["content"]
    assert [one["token"] for one in tokens] == [" é", "!"], tokens
    # 3. The engine's own errors
    try:
        ask(max_tokens=20_000)
    except litellm.BadRequestError as error:
        assert "are over 10000 tokens" in str(error), error  # noqa: PT017 - no pytest in this environment
    else:
        raise AssertionError("it was not refused")
    # 4. A stream that is given up ends at the engine, too
    before, long = left(), ask(max_tokens=9000, stream=True)
    next(iter(long))
    long.completion_stream.response.close()
    until = time.monotonic() + PATIENCE
    while left() != before + 1:
        assert time.monotonic() < until, "the engine goes on"
        time.sleep(0.05)


main(*sys.argv[1:])
