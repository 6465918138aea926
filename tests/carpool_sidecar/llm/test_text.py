from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool_sidecar.llm.text import Text

ERRORS = ("ignore", "replace")  # broken characters are left out, or shown; tokenizers do either


def decoded(ids, errors):
    """A tokenizer whose tokens are bytes; a character whose end is missing has no text yet."""
    return bytes(ids).decode("utf-8", errors)


def played(pieces, errors, stops=(), *, windows=True):
    text, out = Text(stops), []
    for at, ids in enumerate(pieces):
        needed = text.add(ids)
        out.append(text.take(decoded(needed, errors), end=at == len(pieces) - 1))
        if windows and text.long:
            text.move(decoded(text.context(), errors))
    return out, text


def test_a_character_comes_whole():
    pieces = [[byte] for byte in "aä😀b".encode()]
    assert played(pieces, "ignore")[0] == ["a", "", "ä", "", "", "", "😀", "b"]
    assert played(pieces, "replace")[0] == ["a", "", "ä", "", "", "", "😀", "b"]


def test_an_incomplete_one_at_the_end_is_shown_as_the_tokenizer_does():
    assert played([[97], [0xC3]], "replace")[0] == ["a", "\ufffd"]


@pytest.mark.parametrize("errors", ERRORS)
@given(data=st.data())
def test_the_pieces_of_any_text_are_the_text(errors, data):
    # Characters of every length, so that windows begin anywhere.
    ids = list(data.draw(st.text(alphabet="aäß☃😀 ", max_size=120)).encode())
    cuts = data.draw(st.lists(st.integers(1, 5), min_size=len(ids), max_size=len(ids)))
    pieces = []
    while ids:
        size = cuts[len(pieces)]
        pieces.append(ids[:size])
        ids = ids[size:]
    whole = decoded([each for piece in pieces for each in piece], errors)
    assert "".join(played(pieces, errors)[0]) == whole


@given(st.lists(st.integers(0, 255), max_size=80))
def test_broken_bytes_come_as_from_one_run(ids):
    # Windows move four tokens at most into the past: within broken bytes, only such as are no part of a character.
    pieces = [[each] for each in ids]
    assert "".join(played(pieces, "replace", windows=False)[0]) == decoded(ids, "replace")


def test_decoding_is_bounded():
    text = Text()
    for _ in range(1000):
        needed = text.add([97])
        text.take(decoded(needed, "ignore"))
        assert len(needed) <= 20
        if text.long:
            text.move(decoded(text.context(), "ignore"))


@pytest.mark.parametrize("cut", range(1, 8))
def test_nothing_of_a_stop_string_comes(cut):
    ids = list(b"one END two")
    out, text = played([ids[at : at + cut] for at in range(0, len(ids), cut)], "ignore", ["END", "two"])
    assert ("".join(out), text.stopped) == ("one ", True)


def test_the_earliest_stop_string_counts():
    assert played([list(b"abcd")], "ignore", ["d", "bc"])[0] == ["a"]


def test_what_only_looks_like_one_comes_when_it_is_known():
    out, text = played([[each] for each in b"ENTER E"], "ignore", ["END"])
    assert (out, text.stopped) == (["", "", "ENT", "", "ER", " ", "E"], False)


@given(st.text(alphabet="ab", max_size=30), st.text(alphabet="ab", min_size=1, max_size=4), st.integers(1, 4))
def test_text_up_to_the_stop_string_is_the_same_however_it_is_cut(text, stop, size):
    ids = list(text.encode())
    pieces = [ids[at : at + size] for at in range(0, len(ids), size)]
    assert "".join(played(pieces, "ignore", [stop])[0]) == text.split(stop)[0]
