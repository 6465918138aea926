from __future__ import annotations

import pytest

from carpool.batching.requests import Refused
from carpool_sidecar.answers import REFUSALS, retry_after, shareable


def test_headers_of_one_body_or_one_caller_are_not_shared():
    headers = [
        (b"Content-Type", b"application/json"),
        (b"Content-Length", b"3"),
        (b"Set-Cookie", b"a=b"),
        (b"ETag", b"x"),
        (b"Inference-Header-Content-Length", b"3"),
        (b"Connection", b"X-Hop"),
        (b"X-Hop", b"1"),
        (b"Server", b"triton"),
    ]
    assert shareable(headers) == [(b"Content-Type", b"application/json"), (b"Server", b"triton")]


@pytest.mark.parametrize(("seconds", "value"), [(0.0, b"1"), (0.3, b"1"), (1.01, b"2"), (7.0, b"7")])
def test_retry_after_is_whole_seconds_and_at_least_one(seconds, value):
    assert retry_after(seconds) == (b"retry-after", value)


def test_every_reason_to_refuse_has_a_status_and_words():
    assert set(REFUSALS) == set(Refused)
    assert all(status in {429, 503, 504} and text for status, text in REFUSALS.values())
