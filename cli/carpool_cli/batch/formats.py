"""File formats of an offline job: input rows and answers, as JSON lines or npz."""

from __future__ import annotations

import io
from codecs import BOM_UTF8
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import msgspec
import numpy as np
from msgspec import Raw

from carpool_cli.load.servers import InputSpec, Request
from carpool_cli.profiling import arrays
from carpool_cli.profiling.targets import ServerTarget, Target, TargetError
from carpool_sidecar.backends import arrays as backend

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from carpool_cli.profiling.arrays import Array, Arrays

Row: TypeAlias = Any
"""An input row, or its answer: JSON text, or a dict of arrays by name, depending on the job."""


class BadRow(NamedTuple):
    """A row that can't be answered: its number for users (lines from 1, npz rows from 0), and why.

    ``record``: its line in the error file, if the format has its own.
    """

    number: int
    error: str
    record: bytes = b""


class Item(NamedTuple):
    """A row of the input. ``position``: where the next one begins."""

    number: int
    position: int
    row: Row


class Source(Protocol):
    """Rows in order, and the format of their answers."""

    size: int
    """Number of positions."""
    ahead: int
    """Most positions that are read before earlier ones are answered: this bounds the memory."""
    unit: str
    """Unit of a row's number."""

    @property
    def assemble(self) -> Callable[[Path, Path], None] | None:
        """Converts the journal's part to the output, where their formats differ."""

    def read(self, count: int) -> tuple[list[Item], list[BadRow]]:
        """Return the next rows, at most ``count``, and the unreadable ones among them; none at the end."""

    def encode(self, answers: Sequence[Row | BadRow | None]) -> bytes:
        """Format answers for the output: one for each row read, a bad row in its place, ``None`` for a blank."""

    def report(self, row: BadRow) -> bytes:
        """Return the line of a bad row in the error file."""

    def close(self) -> None:
        """Close the file."""

    @property
    def position(self) -> int:
        """Where the next row begins."""

    @property
    def number(self) -> int:
        """Number of the last row read."""


MOST_AHEAD = 64 * 2**20
"""Bytes of lines in memory from which reading ahead stops."""

LONGEST_LINE = 64 * 2**20
"""Longest line that is read, in bytes."""


class JsonLines:
    """One instance per line; blank lines are skipped. With ``specs``, rows become arrays of these inputs.

    Reads from the byte ``position``, after line ``number``, up to the byte ``end``.
    """

    assemble = None
    unit = "line"
    ahead = MOST_AHEAD

    def __init__(
        self, path: Path, position: int, number: int, specs: list[InputSpec] | None, end: int | None = None
    ) -> None:
        self._stream = path.open("rb")
        self._stream.seek(position)
        self.size = path.stat().st_size if end is None else end
        self.position = position
        self.number = number
        self._specs = specs

    def read(self, count: int) -> tuple[list[Item], list[BadRow]]:
        """Read lines."""
        items: list[Item] = []
        bad: list[BadRow] = []
        while len(items) + len(bad) < count and self.position < self.size and (line := self._line()):
            self.number += 1
            if len(line) > LONGEST_LINE:
                bad.append(BadRow(self.number, f"the line has over {LONGEST_LINE} bytes"))
                continue
            if not line.strip():
                continue
            try:
                items.append(Item(self.number, self.position, self._row(line.strip())))
            except (ValueError, OverflowError, TypeError, RecursionError) as error:
                bad.append(BadRow(self.number, str(error)))
        return items, bad

    def encode(self, answers: Sequence[Row | BadRow | None]) -> bytes:
        """Write one answer per line: unchanged, or the only output's value, or an object of all outputs.

        A bad row's line is ``null`` and a blank line stays blank, so that line n answers line n of the input.
        """
        lines = []
        for answer in answers:
            if answer is None:
                lines.append(b"")
            elif isinstance(answer, BadRow):
                lines.append(b"null")
            elif isinstance(answer, dict):
                values = {name: value.tolist() for name, value in answer.items()}
                lines.append(msgspec.json.encode(values if len(values) > 1 else next(iter(values.values()))))
            else:
                lines.append(bytes(answer))
        return b"".join(line + b"\n" for line in lines)

    def report(self, row: BadRow) -> bytes:
        """Return its number and the error."""
        return _reported(row)

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def _line(self) -> bytes:
        """Read a line; if it is too long, return its beginning."""
        line = part = self._stream.readline(LONGEST_LINE + 1)
        first = self.position == 0
        self.position += len(line)
        while part and not part.endswith(b"\n"):
            part = self._stream.readline(LONGEST_LINE)
            self.position += len(part)
        return line.removeprefix(BOM_UTF8) if first else line

    def _row(self, line: bytes) -> Row:
        try:
            value = msgspec.json.decode(line)
        except msgspec.DecodeError as error:
            raise ValueError(f"not JSON: {error}") from None
        if self._specs is None:
            return line
        if len(self._specs) > 1 or isinstance(value, dict):
            if not isinstance(value, dict):
                raise ValueError(f"expected an object with {', '.join(spec.name for spec in self._specs)}")
            missing = [spec.name for spec in self._specs if spec.name not in value]
            if missing:
                raise ValueError(f"no {missing[0]!r} in it")
        else:
            value = {self._specs[0].name: value}
        return {spec.name: _array(value[spec.name], spec) for spec in self._specs}


def _array(value: object, spec: InputSpec) -> Array:
    """Make an array of a JSON value, as the sidecar does: a value of another kind is an error, and not converted.

    Raises ``ValueError``.
    """
    if spec.datatype not in backend.DTYPES:
        return np.array(value)
    try:
        return backend.array(value, backend.Spec(spec.name, spec.datatype, ()), "the row")
    except backend.Invalid as error:
        raise ValueError(str(error)) from None


class Npz:
    """Arrays by input name, dim 0 the rows; the output has the answers' arrays by output name.

    Until it is complete, the output is a sequence of npz files, each preceded by its length in 8 bytes.
    """

    unit = "row"
    ahead = 1 << 62  # everything is in memory anyway

    def __init__(self, given: Arrays, position: int, end: int | None = None) -> None:
        self._given = given
        self.size = arrays.rows_of(given) if end is None else end
        self.position = position

    @property
    def number(self) -> int:
        """Number of the last row read."""
        return self.position - 1

    def read(self, count: int) -> tuple[list[Item], list[BadRow]]:
        """Slice rows off."""
        first = self.position
        self.position = min(first + count, self.size)
        return [
            Item(row, row + 1, {name: array[row] for name, array in self._given.items()})
            for row in range(first, self.position)
        ], []

    def encode(self, answers: Sequence[Row | BadRow | None]) -> bytes:
        """Return an npz file of these rows, preceded by its length; bad rows are left out."""
        good = [answer for answer in answers if isinstance(answer, dict)]
        if not good:
            return b""
        stream = io.BytesIO()
        np.savez(stream, **_storable(_stacked(good)))  # type: ignore[arg-type] # numpy's stub takes allow_pickle for one
        return stream.tell().to_bytes(8, "little") + stream.getvalue()

    def report(self, row: BadRow) -> bytes:
        """Return its number and the error."""
        return _reported(row)

    def close(self) -> None:
        """Nothing to close: the file was read completely."""

    @staticmethod
    def assemble(part: Path, output: Path) -> None:
        """Concatenate the pieces."""
        pieces: list[Arrays] = []
        with part.open("rb") as stream:
            while length := stream.read(8):
                with np.load(io.BytesIO(stream.read(int.from_bytes(length, "little"))), allow_pickle=False) as found:
                    pieces.append({name: found[name] for name in found.files})
        _save(pieces, output)

    @staticmethod
    def join(parts: list[Path], output: Path) -> None:
        """Combine several files; those without rows have no arrays."""
        pieces: list[Arrays] = []
        for part in parts:
            with np.load(part, allow_pickle=False) as found:
                if found.files:
                    pieces.append({name: found[name] for name in found.files})
        _save(pieces, output)


def _save(pieces: list[Arrays], output: Path) -> None:
    whole = {name: np.concatenate([piece[name] for piece in pieces]) for name in (pieces[0] if pieces else ())}
    with output.open("wb") as made:
        np.savez(made, **whole)  # type: ignore[arg-type] # as above


def run_arrays(target: Target, rows: Sequence[Row]) -> list[Row]:
    """Answer rows of arrays in one batch; with different shapes, one batch per shape, in the original order.

    Raises ``TargetError``, also if the answer lacks rows.
    """
    answers: list[Row] = []
    start = 0
    while start < len(rows):
        shapes = {name: value.shape for name, value in rows[start].items()}
        stop = start + 1
        while stop < len(rows) and {name: value.shape for name, value in rows[stop].items()} == shapes:
            stop += 1
        outputs = target.prepare(_stacked(rows[start:stop]))()
        for name, value in outputs.items():
            if not value.ndim or value.shape[0] != stop - start:
                raise TargetError(
                    f"output {name!r} has shape {list(value.shape)} for {stop - start} rows", input_fault=True
                )
        answers += [{name: value[row] for name, value in outputs.items()} for row in range(stop - start)]
        start = stop
    return answers


def run_json(target: ServerTarget, rows: Sequence[Row]) -> list[Row]:
    """Answer V1 instances in one batch, each as its JSON text; predictions are texts, too.

    Raises ``TargetError``, also if the answer lacks rows.
    """
    body = b'{"instances":[%b]}' % b",".join(rows)
    _, answer = target.post(Request(body, [(b"content-type", b"application/json")]))
    try:
        predictions = _predictions.decode(answer).predictions
    except msgspec.DecodeError as error:
        raise TargetError(f"the answer is no V1 answer: {error}", input_fault=False) from None
    if len(predictions) != len(rows):
        raise TargetError(f"{len(predictions)} predictions for {len(rows)} rows", input_fault=True)
    # One line per answer: a server may format its JSON over several, and strings can't contain a raw line break.
    return [bytes(one).replace(b"\n", b" ") for one in predictions]


def _reported(row: BadRow) -> bytes:
    return msgspec.json.encode({"line": row.number, "error": row.error}) + b"\n"


class _RawPredictions(msgspec.Struct):
    predictions: list[Raw]


_predictions = msgspec.json.Decoder(_RawPredictions)


def _stacked(rows: Sequence[Row]) -> Arrays:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _storable(found: Arrays) -> Arrays:
    """Convert texts to numpy's own strings: npz files with Python objects can't be read safely."""
    return {name: array.astype(str) if array.dtype == object else array for name, array in found.items()}
