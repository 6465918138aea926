"""Run by `check_openai.py` with the `openai` package: streams, whole answers, errors and a stream that is given up."""

from __future__ import annotations

import sys

import openai

MESSAGES = [{"role": "user", "content": "Count, please."}]


def main(url: str) -> None:
    """Use the client as its users do."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    # 1. In events, with the usage at the end
    stream = client.chat.completions.create(
        model="m", messages=MESSAGES, max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == " 0 1 2 3 4", text
    assert chunks[-1].usage.completion_tokens == 5, chunks[-1]
    # 2. Whole
    whole = client.completions.create(model="m", prompt="Count", max_tokens=3)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (" 0 1 2", "length"), whole
    # 3. Refused while another one has the engine; then that one is given up, and the engine is free
    with client.completions.create(model="m", prompt="x", max_tokens=9000, stream=True) as long:
        next(iter(long))
        try:
            client.chat.completions.create(model="m", messages=MESSAGES)
        except openai.RateLimitError as error:
            assert (error.code, error.response.headers["retry-after"]) == ("ttft", "1"), error  # noqa: PT017 - no pytest
        else:
            raise AssertionError("it was not refused")
    patient = client.with_options(max_retries=5)
    assert patient.completions.create(model="m", prompt="x", max_tokens=2).usage.completion_tokens == 2
    # 4. The server's own errors
    try:
        client.completions.create(model="m", prompt="x", max_tokens=20_000)
    except openai.BadRequestError as error:
        assert error.code == "length", error  # noqa: PT017 - no pytest in this environment
    else:
        raise AssertionError("it was not refused")


main(sys.argv[1])
