from __future__ import annotations

import json

import pytest

from carpool_sidecar.jobs.api import submission
from carpool_sidecar.jobs.records import Refused

PATH = "/v1/models/m:predict"


def read(**fields):
    return submission.read(json.dumps({"path": PATH} | fields).encode())


def test_a_body_is_sent_as_it_is_written():
    call = submission.read(b'{"path": "/v1/models/m:predict", "body": {"instances": [1.50, 1e2]}}')
    assert (call.method, call.target, call.body) == ("POST", PATH, b'{"instances": [1.50, 1e2]}')
    assert call.headers == [("content-type", "application/json")]


def test_bytes_come_in_base64_and_headers_as_given():
    call = read(base64="AAH/", headers={"Content-Type": "application/octet-stream", "X-User": "a"}, method="PUT")
    assert (call.method, call.body) == ("PUT", b"\0\1\xff")
    assert call.headers == [("Content-Type", "application/octet-stream"), ("X-User", "a")]
    assert read().body == b""


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"path": "v1/x"}, "path"),
        ({"path": "/x y"}, "path"),
        ({"path": "/x\r\nA: b"}, "path"),
        ({"path": "/v1/jobs/job_1"}, "served by the sidecar itself"),
        ({"path": "/v1/batches?x"}, "served by the sidecar itself"),
        ({"method": "CONNECT"}, "method"),
        ({"body": 1, "base64": "AA=="}, "both"),
        ({"base64": "not base64"}, "base64"),
        ({"headers": {"Authorization": "Bearer x"}}, "jobs.authorizationFile"),
        ({"headers": {"X-Api-Key": "x"}}, "jobs.authorizationFile"),
        ({"headers": {"Content-Length": "3"}}, "leave it out"),
        ({"headers": {"X-Carpool-Priority": "high"}}, "leave it out"),
        ({"headers": {"X-A": "b\r\nC: d"}}, "no header"),
        ({"headers": {"X A": "b"}}, "no header"),
        ({"headers": {f"X-{number}": "b" for number in range(65)}}, "at most 64"),
        ({"pth": "/x"}, "pth"),
        ({"body": {}, "timeout": 3}, "timeout"),
    ],
)
def test_what_is_wrong_is_named(fields, says):
    with pytest.raises(Refused, match=says) as refused:
        read(**fields)
    assert refused.value.status == 400


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b'{"body": 1}', b'{"path": 3}'])
def test_what_is_no_submission_is_refused(text):
    with pytest.raises(Refused) as refused:
        submission.read(text)
    assert refused.value.reason == "jobs-malformed"


@pytest.mark.parametrize("text", [b'{"path": "/\xe9"}', b'{"path": "/x", "body": %b}' % (b"[" * 5000 + b"]" * 5000)])
def test_a_text_that_no_reader_reads_is_refused(text):
    with pytest.raises(Refused):
        submission.read(text)
