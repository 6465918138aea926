"""Run by `check_openai.py` with `langchain-openai`: streams, whole answers, errors, tools, a stream given up."""

from __future__ import annotations

import sys

import openai
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def add(first: int, second: int) -> int:
    """Add."""
    return first + second


def main(url: str) -> None:
    """Use it as its users do."""

    def model(tokens: int, retries: int = 0) -> ChatOpenAI:
        return ChatOpenAI(
            model="m", base_url=f"{url}/v1", api_key="none", max_retries=retries, max_tokens=tokens, stream_usage=True
        )

    # 1. In events, with the usage at the end, and with tools, which the server may use or not
    chunks = list(model(5).bind_tools([add]).stream("Count, please."))
    assert "".join(chunk.text for chunk in chunks) == " 0 1 2 3 4", chunks
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 5, chunks
    # 2. Whole
    whole = model(3).invoke("Count, please.")
    assert (whole.content, whole.response_metadata["finish_reason"]) == (" 0 1 2", "length"), whole
    # 3. Refused while another one has the engine; that one is given up then, and the engine is free
    long = model(9000).stream("Count, please.")
    next(long)
    try:
        model(2).invoke("Count, please.")
    except openai.RateLimitError as error:
        assert error.code == "ttft", error  # noqa: PT017 - no pytest
    else:
        raise AssertionError("it was not refused")
    long.close()
    assert model(2, retries=5).invoke("Count, please.").usage_metadata["output_tokens"] == 2
    # 4. The server's own errors
    try:
        model(20_000).invoke("Count, please.")
    except openai.BadRequestError as error:
        assert error.code == "length", error  # noqa: PT017 - no pytest in this environment
    else:
        raise AssertionError("it was not refused")


main(sys.argv[1])
