from __future__ import annotations

import pytest

from carpool.batching.requests import FaultKind, Refused
from carpool_sidecar.dispatch.answers import REFUSALS, callers_fault, fault_kind, retry_after, shareable


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


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (200, None), (201, None), (204, None),
        (400, FaultKind.ITEM), (422, FaultKind.ITEM), (500, FaultKind.ITEM),
        (413, FaultKind.SIZE),
        (401, FaultKind.SHARED), (403, FaultKind.SHARED), (404, FaultKind.SHARED), (429, FaultKind.SHARED),
        (301, FaultKind.SHARED), (501, FaultKind.SHARED),
        (502, FaultKind.TRANSPORT), (503, FaultKind.TRANSPORT), (504, FaultKind.TRANSPORT),
    ],
)  # fmt: skip
def test_whose_fault_a_status_is(status, kind):
    assert fault_kind(status) is kind


def test_the_caller_is_to_blame_for_4xx_but_not_for_a_lack_of_time():
    assert [status for status in (200, 400, 404, 408, 413, 422, 429, 499, 500, 503) if callers_fault(status)] == [
        400, 404, 413, 422, 499,
    ]  # fmt: skip
