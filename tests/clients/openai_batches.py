"""Run by `check_openai.py` with the `openai` package: files and batches, from upload to result, and what is refused."""

from __future__ import annotations

import io
import json
import sys
import time

import openai

PATIENCE = 60.0
ENDPOINT = "/v1/chat/completions"


def line(number: int, **changes: object) -> str:
    """Write one request of a file."""
    body = {"model": "m", "messages": [{"role": "user", "content": f"Count, {number}."}], "max_tokens": 3}
    return json.dumps({"custom_id": f"c{number}", "method": "POST", "url": ENDPOINT, "body": body} | changes)


def ended(client: openai.OpenAI, identity: str) -> openai.types.Batch:
    """Wait for the end of a batch."""
    deadline = time.monotonic() + PATIENCE
    while (batch := client.batches.retrieve(identity)).status in {"in_progress", "cancelling"}:
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
    return batch


def main(url: str) -> None:
    """Use the client as its users do."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="mine", max_retries=0)
    # 1. A file, and a batch of it
    text = "\n".join([*map(line, range(40)), line(40, url="/v1/other")])
    file = client.files.create(file=("in.jsonl", io.BytesIO(text.encode())), purpose="batch")
    assert (file.bytes, file.filename, file.purpose) == (len(text), "in.jsonl", "batch"), file
    batch = client.batches.create(
        input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h", metadata={"for": "a test"}
    )
    batch = ended(client, batch.id)
    assert batch.status == "completed", batch
    assert (batch.request_counts.completed, batch.request_counts.failed, batch.request_counts.total) == (40, 1, 41)
    assert batch.metadata == {"for": "a test"}, batch
    # 2. Its results
    answers = [json.loads(one) for one in client.files.content(batch.output_file_id).text.splitlines()]
    assert [one["custom_id"] for one in answers] == [f"c{number}" for number in range(40)], answers
    assert answers[0]["response"]["body"]["choices"][0]["message"]["content"] == " 0 1 2", answers[0]
    errors = [json.loads(one) for one in client.files.content(batch.error_file_id).text.splitlines()]
    assert [(one["custom_id"], one["error"]["code"]) for one in errors] == [("c40", "invalid_request")], errors
    # 3. Lists are the caller's own
    assert [one.id for one in client.batches.list(limit=1)] == [batch.id]
    assert len(list(client.files.list())) == 3
    assert not list(client.with_options(api_key="somebody else's").batches.list())
    # 4. Cancelled, deleted, refused
    long = client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="1h")
    cancelled = client.batches.cancel(long.id)
    assert cancelled.status in {"cancelling", "cancelled"}, cancelled
    assert ended(client, long.id).status == "cancelled"
    assert client.files.delete(file.id).deleted
    for wrong, error in (
        (lambda: client.files.retrieve(file.id), openai.NotFoundError),
        (lambda: client.files.create(file=b"{}", purpose="fine-tune"), openai.BadRequestError),
        (lambda: client.batches.cancel(long.id), openai.ConflictError),
    ):
        try:
            wrong()
        except error:
            continue
        raise AssertionError("it was not refused")


main(sys.argv[1])
