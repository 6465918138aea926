"""Shards of an offline job: parts of one input that run independently, each with its own output and journal."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import click

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CHUNK = 1 << 20


class Shard(NamedTuple):
    """Shard ``number``, from 0, of ``of``."""

    number: int
    of: int

    def part(self, size: int) -> range:
        """Return this shard's part of a number of rows, or bytes."""
        return range(size * self.number // self.of, size * (self.number + 1) // self.of)

    def output(self, output: Path) -> Path:
        """Return the path of its answers: ``answers-00002-of-00008.jsonl``."""
        return output.with_name(f"{output.stem}-{self.number:05d}-of-{self.of:05d}{output.suffix}")


class Lines(NamedTuple):
    """Lines of a file: from the byte ``begin`` up to ``end``, after ``number`` others."""

    begin: int
    end: int
    number: int


def lines(path: Path, shard: Shard) -> Lines:
    """Find a shard's lines: those that begin in its part of the file's bytes.

    The file is read once up to the part, to count lines: line numbers are those of the whole file. 10 GB take some
    seconds.
    """
    part = shard.part(path.stat().st_size)
    with path.open("rb") as stream:
        number, left, last = 0, part.start, b"\n"
        while left and (chunk := stream.read(min(CHUNK, left))):
            number, left, last = number + chunk.count(b"\n"), left - len(chunk), chunk
        if not last.endswith(b"\n"):
            stream.readline()  # the line began in the previous shard
            number += 1
        begin = stream.tell()
        stream.seek(max(0, part.stop - 1))
        stream.readline()  # the line that contains the part's end
        end = stream.tell() if part.stop else 0
    return Lines(min(begin, end), end, number)


def join(output: Path, of: int, assemble: Callable[[list[Path], Path], None] | None) -> int:
    """Join the outputs of all shards into one, in order, with the lines of their errors; return the number of these.

    ``assemble`` combines files whose format is not lines. Raises ``click.ClickException`` if one is missing, or the
    output exists.
    """
    parts = [Shard(index, of).output(output) for index in range(of)]
    missing = [part.name for part in parts if not part.exists() or _with(part, ".checkpoint").exists()]
    if missing:
        more = f" and {len(missing) - 3} others" if len(missing) > 3 else ""
        raise click.ClickException(f"not finished: {', '.join(missing[:3])}{more}; run these shards first")
    if output.exists():
        raise click.ClickException(f"{output} exists already: remove it, or name another output")
    made = _with(output, ".new")
    if assemble is not None:
        assemble(parts, made)
    else:
        _concatenate(parts, made)
    errors = [found for part in parts if (found := _with(part, ".errors.jsonl")).exists()]
    bad = _concatenate(errors, _with(output, ".errors.jsonl")) if errors else 0
    made.replace(output)
    return bad


def _concatenate(parts: list[Path], output: Path) -> int:
    """Write the parts one after the other; return the number of lines."""
    count = 0
    with output.open("wb") as whole:
        for part in parts:
            with part.open("rb") as stream:
                while chunk := stream.read(CHUNK):
                    count += chunk.count(b"\n")
                    whole.write(chunk)
    return count


def _with(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
