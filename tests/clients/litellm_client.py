"""Run by `check_openai.py` with `litellm`: streams, whole answers, errors, tools, a stream that is given up."""

from __future__ import annotations

import sys

import litellm

MESSAGES = [{"role": "user", "content": "Count, please."}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def main(url: str) -> None:
    """Use it as its users do."""
    served = {"model": "openai/m", "api_base": f"{url}/v1", "api_key": "none", "num_retries": 0, "max_retries": 0}
    # 1. In events, with the usage at the end, and with tools, which the server may use or not
    stream = litellm.completion(
        **served, messages=MESSAGES, max_tokens=5, stream=True, stream_options={"include_usage": True}, tools=[TOOL]
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == " 0 1 2 3 4", text
    assert chunks[-1].usage.completion_tokens == 5, chunks[-1]
    # 2. Whole
    whole = litellm.completion(**served, messages=MESSAGES, max_tokens=3)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (" 0 1 2", "length"), whole
    # 3. Refused while another one has the engine; that one is given up then, and the engine is free
    long = litellm.completion(**served, messages=MESSAGES, max_tokens=9000, stream=True)
    next(iter(long))
    try:
        litellm.completion(**served, messages=MESSAGES)
    except litellm.RateLimitError as error:
        assert "the first token would come too late" in str(error), error  # noqa: PT017 - no pytest
    else:
        raise AssertionError("it was not refused")
    long.completion_stream.response.close()
    again = litellm.completion(**{**served, "max_retries": 5}, messages=MESSAGES, max_tokens=2)
    assert again.usage.completion_tokens == 2, again
    # 4. The server's own errors
    try:
        litellm.completion(**served, messages=MESSAGES, max_tokens=20_000)
    except litellm.BadRequestError as error:
        assert "are over 10000 tokens" in str(error), error  # noqa: PT017 - no pytest in this environment
    else:
        raise AssertionError("it was not refused")


main(sys.argv[1])
