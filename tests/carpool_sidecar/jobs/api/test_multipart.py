from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool_sidecar.jobs.api.multipart import MOST_PARTS, Form, FormError, Part

KIND = b"multipart/form-data; boundary=B0"


def read(form, chunks):
    found = {}
    for chunk in chunks:
        for event in form.feed(chunk):
            if isinstance(event, Part):
                name = event.name
                found[name] = b""
            else:
                found[name] += event
    return found


def written(fields):
    parts = [
        b'--B0\r\nContent-Disposition: form-data; name="%b"\r\nContent-Type: text/plain\r\n\r\n%b\r\n' % pair
        for pair in fields
    ]
    return b"".join(parts) + b"--B0--\r\n"


@given(
    st.lists(
        st.binary(max_size=30) | st.sampled_from([b"\r\n--B", b"\r\n", b"--B0", b"\r", b"\r\n--B\r\n"]), max_size=4
    ),
    st.lists(st.integers(1, 40), min_size=1, max_size=20),
)
def test_parts_come_back_however_they_are_cut(values, cuts):
    values = [value for value in values if b"\r\n--B0" not in b"\r\n" + value + b"\r\n"]
    fields = [(b"f%d" % number, value) for number, value in enumerate(values)]
    text, form, chunks = written(fields), Form(KIND), []
    for size in cuts * (len(text) // sum(cuts) + 1):
        chunks.append(text[:size])
        text = text[size:]
    found = read(form, chunks)
    assert found == {name.decode(): value for name, value in fields}
    assert form.complete


def test_a_file_has_its_name():
    form = Form(b'multipart/form-data; boundary="a b"')
    head = b'--a b\r\ncontent-disposition: form-data; name="file"; filename="x.jsonl"\r\n\r\n'
    assert form.feed(head + b"1")[0] == Part("file", "x.jsonl")


@pytest.mark.parametrize("kind", [b"", b"application/json", b"multipart/form-data", b"multipart/form-data; boundary="])
def test_what_has_no_boundary_is_no_form(kind):
    with pytest.raises(FormError):
        Form(kind)


def test_heads_are_bounded_and_need_a_name():
    with pytest.raises(FormError, match="headers"):
        Form(KIND).feed(b"--B0\r\n" + b"x" * 10_000)
    with pytest.raises(FormError, match="no name"):
        Form(KIND).feed(b"--B0\r\nContent-Disposition: form-data\r\n\r\n")


def test_parts_are_bounded():
    assert len(read(Form(KIND), [written((b"f%d" % number, b"") for number in range(MOST_PARTS))])) == MOST_PARTS
    with pytest.raises(FormError, match="over 16 parts: send the fields purpose and file only"):
        Form(KIND).feed(written([(b"f", b"")] * (MOST_PARTS + 1)))
