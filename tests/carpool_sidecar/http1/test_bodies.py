from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool_sidecar.http1.bodies import BodyReader, ChunkedDecoder
from carpool_sidecar.http1.parsing import IN_CHUNKS, UNTIL_CLOSE, HttpError

WIRE = b'5;name="v"\r\nhello\r\n00A\r\n0123456789\r\n1\r\n\r\r\n0\r\nX-Trailer: dropped\r\nY:\r\n\r\n'
CONTENT = b"hello0123456789\r"


def read(reader: BodyReader, pieces: list[bytes]) -> int:
    """Feed pieces until the body is complete; return how many bytes belonged to it."""
    used = 0
    for piece in pieces:
        position = 0
        while position < len(piece) and not reader.complete:
            found = []
            position = reader.read(piece, position, found)
            reader.keep(found)
        used += position
    return used


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges) if b > a]


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 200), max_size=30))
def test_any_split_of_a_chunked_body_reads_the_same(cuts):
    reader = BodyReader(IN_CHUNKS)
    assert read(reader, split(WIRE + b"GET / next", cuts)) == len(WIRE)
    assert reader.complete
    assert reader.join() == CONTENT


@pytest.mark.parametrize("line", [b"5 ;a", b"5\t ; a = b", b"5 ;"])
def test_whitespace_before_a_chunk_extension_is_skipped(line):
    reader = BodyReader(IN_CHUNKS)
    read(reader, [line + b"\r\nhello\r\n0 ;a\r\n\r\n"])
    assert reader.complete
    assert reader.join() == b"hello"


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 200), max_size=30))
def test_any_split_of_a_body_of_known_length_reads_the_same(cuts):
    reader = BodyReader(26)
    assert read(reader, split(b"abcdefghijklmnopqrstuvwxyzNEXT", cuts)) == 26
    assert reader.complete
    assert reader.join() == b"abcdefghijklmnopqrstuvwxyz"


@pytest.mark.parametrize(
    "wire",
    [
        b"x\r\n",
        b"\r\n",
        b"0x5\r\nhello\r\n",
        b"+5\r\nhello\r\n",
        b"-5\r\nhello\r\n",
        b" 5\r\nhello\r\n",
        b"5 \r\nhello\r\n",
        b" 5;a\r\nhello\r\n",
        b"5 a\r\nhello\r\n",
        b"5 a;b\r\nhello\r\n",
        b"5\x0b;a\r\nhello\r\n",
        b"5_0\r\n",
        b"5\nhello\r\n",
        b"5;a\nhello\r\n",
        b"5;a\rb\r\nhello\r\n",
        b"5;\0\r\nhello\r\n",
        b"5\r\nhello\n0\r\n\r\n",
        b"5\r\nhelloXX0\r\n\r\n",
        b"5\r\nhello\rX",
        b"5\r\nhello0\r\n\r\n",
        b"1" * 16 + b"\r\n",
        b"0\r\nX\r\n\r\n",
        b"0\r\nX : y\r\n\r\n",
        b"0\r\n X: y\r\n\r\n",
        b"0\r\nX: y\n\r\n",
        b"0\r\nX: \x01\r\n\r\n",
        b"5;" + b"a" * 2000,
        b"0\r\n" + b"X: y\r\n" * 3000,
    ],
)
@pytest.mark.parametrize("step", [1, 3, 100_000])
def test_broken_chunks_are_refused_however_they_are_split(wire, step):
    decoder = ChunkedDecoder()

    def decode():
        for start in range(0, len(wire), step):
            piece, position = wire[start : start + step], 0
            while position < len(piece):
                position = decoder.feed(piece, position, [])

    with pytest.raises(HttpError) as refusal:
        decode()
    assert refusal.value.status == 400
    assert not decoder.done


def test_one_piece_is_the_very_same_object():
    body = b"x" * 10_000
    reader = BodyReader(len(body))
    read(reader, [body])
    assert reader.join() is body


def test_pieces_wait_uncopied_and_are_joined_once():
    first, second = bytes(10_000), bytes(5_000)
    reader = BodyReader(14_000)
    pieces = []
    reader.read(first, 1_000, pieces)
    assert isinstance(pieces[0], memoryview)
    assert pieces[0].obj is first
    reader.keep(pieces)
    pieces = []
    reader.read(second, 0, pieces)
    assert pieces == [second]
    assert pieces[0] is second
    reader.keep(pieces)
    assert reader.complete
    assert len(reader.join()) == 14_000


def test_a_body_in_tiny_pieces_is_not_kept_in_tiny_objects():
    reader = BodyReader(UNTIL_CLOSE)
    for n in range(50_000):
        reader.keep([b"%d" % (n % 10)])
        assert reader.kept == n + 1
    assert len(reader._parts) < 5
    assert reader.join() == b"0123456789" * 5_000


@pytest.mark.parametrize("chunks", [50, 800])
def test_a_read_that_is_mostly_framing_is_not_kept_for_its_content(chunks):
    reader = BodyReader(IN_CHUNKS)
    content = b"x" * 5_000
    data = b"1;%b\r\nx\r\n" % (b"y" * 1000) * 200 + b"1388\r\n%b\r\n" % content * chunks
    pieces = []
    reader.read(data, 0, pieces)
    reader.keep(pieces)
    assert reader.kept == 200 + 5_000 * chunks
    held = [part for part in reader._parts if isinstance(part, memoryview)]
    assert bool(held) == (chunks == 800)  # of 450 kB 250 are content: copied; of 4,200 kB 4,000: as it is
    assert sum({id(part.obj): len(part.obj) for part in held}.values()) <= 16 / 15 * reader.kept
    assert reader.join() == b"x" * (200 + 5_000 * chunks)


def test_the_first_byte_of_a_body_does_not_keep_what_it_came_with():
    reader = BodyReader(2)
    pieces = []
    reader.read(bytes(250_000), 249_999, pieces)
    reader.keep(pieces)
    assert reader.kept == 1
    assert not any(isinstance(part, memoryview) for part in reader._parts)


def test_what_was_joined_or_dropped_is_not_kept():
    for let_go in (BodyReader.join, BodyReader.drop):
        reader = BodyReader(UNTIL_CLOSE)
        read(reader, [bytes(5_000), bytes(5_000), b"x"])
        let_go(reader)
        assert reader.join() == b""


def test_until_close_never_completes():
    reader = BodyReader(UNTIL_CLOSE)
    assert read(reader, [b"a", b"b"]) == 2
    assert not reader.complete
    assert reader.remaining is None
    assert reader.join() == b"ab"
