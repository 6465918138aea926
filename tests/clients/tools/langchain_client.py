"""Run by `check_tools.py` with `langchain-openai`: tools, logprobs, errors, a stream that is given up."""

from __future__ import annotations

import json
import sys
import time
import urllib.request

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

CALLS = [("look", {"at": "here", "text": 'é "\n'}), ("add", {"first": 1, "second": 2})]
PATIENCE = 30.0


@tool
def look(at: str, text: str) -> str:
    """Look."""
    return at + text


@tool
def add(first: int, second: int) -> int:
    """Add."""
    return first + second


def main(url: str, engine: str) -> None:
    """Use it as its users do."""

    def seen() -> dict:
        with urllib.request.urlopen(f"{engine}/seen") as answer:  # noqa: S310 - 127.0.0.1
            return json.load(answer)

    def model(**fields: object) -> ChatOpenAI:
        return ChatOpenAI(model="m", base_url=f"{url}/v1", api_key="none", max_retries=0, **fields)

    # 1. Tools, in pieces and whole
    asked = [HumanMessage("Look and add, please.")]
    tooled = model().bind_tools([look, add])
    streamed = None
    for chunk in tooled.stream(asked):
        streamed = chunk if streamed is None else streamed + chunk
    for answer in (streamed, tooled.invoke(asked)):
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == CALLS, answer
    # 2. They are called, and the results go back
    tools = {"look": look, "add": add}
    results = [
        ToolMessage(tools[call["name"]].invoke(call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls
    ]
    assert model().invoke([*asked, answer, *results]).content == " é!"
    assert [one["content"] for one in seen()["bodies"][-1]["messages"][2:]] == ['hereé "\n', "3"]
    # 3. Logprobs
    tokens = model(logprobs=True, top_logprobs=1).invoke(asked).response_metadata["logprobs"]["content"]
    assert [(one["token"], one["logprob"]) for one in tokens] == [(" é", -0.25), ("!", -1.5)], tokens
    # 4. The engine's own errors
    try:
        model(max_tokens=20_000).invoke(asked)
    except openai.BadRequestError as error:
        assert (error.code, error.param) == ("length", "max_tokens"), error  # noqa: PT017 - no pytest
    else:
        raise AssertionError("it was not refused")
    # 5. A stream that is given up ends at the engine, too
    before, long = seen()["left"], model(max_tokens=9000).stream(asked)
    next(long)
    long.close()
    until = time.monotonic() + PATIENCE
    while seen()["left"] != before + 1:
        assert time.monotonic() < until, "the engine goes on"
        time.sleep(0.05)


main(*sys.argv[1:])
