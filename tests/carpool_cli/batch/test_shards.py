from __future__ import annotations

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool_cli.batch.shards import Shard, join, lines


@given(st.lists(st.text("ab", max_size=9), max_size=30), st.integers(1, 12), st.booleans())
def test_every_line_is_in_one_shard_with_its_number(tmp_path_factory, texts, of, ended):
    path = tmp_path_factory.mktemp("shards") / "in.jsonl"
    whole = "\n".join(texts) + ("\n" if ended and texts else "")
    path.write_text(whole)
    parts = [lines(path, Shard(index, of)) for index in range(of)]
    assert "".join(whole[part.begin : part.end] for part in parts) == whole
    for part in parts:
        assert part.begin <= part.end
        if part.begin < part.end:
            assert part.number == whole[: part.begin].count("\n")
            assert part.begin == 0 or whole[part.begin - 1] == "\n"


def test_shards_are_of_about_one_size(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("12345\n" * 1000)
    sizes = [part.end - part.begin for part in (lines(path, Shard(index, 7)) for index in range(7))]
    assert max(sizes) - min(sizes) <= 6


def test_only_finished_shards_are_joined(tmp_path):
    output = tmp_path / "out.jsonl"
    for index in range(2):
        Shard(index, 2).output(output).write_text(f"{index}\n")
    unfinished = tmp_path / "out-00001-of-00002.jsonl.checkpoint"
    unfinished.write_text("{}")
    with pytest.raises(click.ClickException, match="out-00001-of-00002"):
        join(output, 2, None)
    unfinished.unlink()
    assert join(output, 2, None) == 0
    assert output.read_text() == "0\n1\n"
    with pytest.raises(click.ClickException, match="exists already"):
        join(output, 2, None)
    output.unlink()
    for index, errors in enumerate(("a\nb\n", "c\n")):
        Shard(index, 2).output(output).with_suffix(".jsonl.errors.jsonl").write_text(errors)
    assert join(output, 2, None) == 3
    assert (tmp_path / "out.jsonl.errors.jsonl").read_text() == "a\nb\nc\n"
