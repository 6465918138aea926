from __future__ import annotations

import pytest

from carpool_sidecar.http1.fields import FieldLines
from carpool_sidecar.http1.messages import CHUNKED, content_length
from carpool_sidecar.http1.parsing import RequestHead
from carpool_sidecar.http1.server.framing import BodyWriter, framing_fields


def head(method: bytes = b"GET", minor_version: int = 1) -> RequestHead:
    return RequestHead(method, b"/", FieldLines(), minor_version, True, 0, False)


@pytest.mark.parametrize(
    ("request_head", "status", "length", "fields"),
    [
        (head(), 200, 5, (content_length(5),)),
        (head(), 200, 0, (content_length(0),)),
        (head(), 200, None, (CHUNKED,)),
        (head(minor_version=0), 200, 5, (content_length(5),)),
        (head(minor_version=0), 200, None, ()),  # the close marks the end
        (head(b"HEAD"), 200, 5, (content_length(5),)),  # what GET would have
        (head(b"HEAD"), 200, None, ()),
        (head(), 204, 0, ()),
        (head(), 204, None, ()),
        (head(), 304, 0, ()),
        (head(), 304, 5, (content_length(5),)),
        (head(), 304, None, ()),
    ],
)
def test_the_fields_say_where_the_body_ends(request_head, status, length, fields):
    assert framing_fields(request_head, status, length) == fields


def test_a_body_of_known_length_is_written_as_it_is():
    writer = BodyWriter(head(), 5)
    assert (writer.piece(b"abc"), writer.is_complete) == ([b"abc"], False)
    assert (writer.piece(b"de"), writer.is_complete, writer.last()) == ([b"de"], True, [])
    with pytest.raises(ValueError, match="announced length"):
        writer.piece(b"f")


def test_a_body_of_unknown_length_is_chunked():
    writer = BodyWriter(head(), None)
    written = [*writer.piece(b"abc"), *writer.piece(b""), *writer.piece(bytes(20)), *writer.last()]
    assert b"".join(written) == b"3\r\nabc\r\n14\r\n" + bytes(20) + b"\r\n0\r\n\r\n"
    assert writer.is_complete


def test_for_http_1_0_it_ends_with_the_connection():
    writer = BodyWriter(head(minor_version=0), None)
    assert (writer.piece(b"abc"), writer.is_complete, writer.last()) == ([b"abc"], True, [])
