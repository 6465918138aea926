"""An output that grows batch by batch and survives a kill at any moment.

Answers are appended to ``OUTPUT.part`` and bad rows to ``OUTPUT.errors.jsonl``. Then ``OUTPUT.checkpoint`` is replaced
atomically: it has the valid lengths of both and the position in the input. The next run cuts off whatever was appended
after the last checkpoint, and does those rows again: nothing is lost and nothing appears twice.
"""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING, BinaryIO, Self

import click
import msgspec
from msgspec import Struct

from carpool_cli.answers import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Progress(Struct, frozen=True):
    """A job's progress. ``position`` and ``number`` are the input's: where to continue, and the last row's number."""

    identity: str
    """The job: input, model, protocol. Another job's progress can't be continued."""
    position: int = 0
    number: int = 0
    output_bytes: int = 0
    error_bytes: int = 0
    answered: int = 0
    skipped: int = 0
    complete: bool = False


class Journal:
    """The three files of a job. Use as a context manager; ``progress`` is the last checkpoint's.

    Raises ``click.ClickException`` if the output exists, belongs to another job, or is being written.
    """

    def __init__(self, output: Path, identity: str) -> None:
        self.output = output
        self.part = output.with_name(output.name + ".part")
        self.errors = output.with_name(output.name + ".errors.jsonl")
        self.checkpoint = output.with_name(output.name + ".checkpoint")
        self.progress = Progress(identity)
        self.resumed = False

    def __enter__(self) -> Self:
        if self.checkpoint.exists():
            self._resume()
            if self.progress.complete:
                return self  # nothing more may be written: see `complete`
        elif self.output.exists():
            raise click.ClickException(f"{self.output} exists already: remove it, or name another output")
        try:
            self._part = self.part.open("ab")
            self._errors = self.errors.open("ab")
        except OSError as error:
            raise click.ClickException(f"{self.output}: {error.strerror}") from None
        try:
            fcntl.flock(self._part, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._close()
            raise click.ClickException(f"{self.output} is being written by another run: wait for it") from None
        for stream, length in ((self._part, self.progress.output_bytes), (self._errors, self.progress.error_bytes)):
            if stream.seek(0, os.SEEK_END) < length:
                self._close()
                raise click.ClickException(
                    f"{stream.name} is gone or shorter than when the last run ended: put it back, "
                    f"or remove {self.checkpoint} to start over"
                )
            stream.truncate(length)
            stream.seek(length)
        return self

    def __exit__(self, *_: object) -> None:
        if not self.progress.complete:
            self._close()
            if not self.checkpoint.exists():  # nothing was done, so leave no file
                self.part.unlink()
                self.errors.unlink()

    def append(self, output: bytes, errors: bytes) -> None:
        """Write answers and bad rows; they count after ``commit``."""
        self._part.write(output)
        self._errors.write(errors)

    def commit(self, *, position: int, number: int, answered: int, skipped: int) -> None:
        """Commit the last appended data, together with the position in the input."""
        for stream in (self._part, self._errors):
            _to_disk(stream)
        self._save(
            Progress(
                self.progress.identity,
                position,
                number,
                self._part.tell(),
                self._errors.tell(),
                answered,
                skipped,
            )
        )

    def finish(self, assemble: Callable[[Path, Path], None] | None) -> None:
        """Turn the part into the output: by a rename, or by ``assemble(part, new file)`` if its format differs."""
        # Once this is written, the next run does only the steps below, which may be repeated.
        self._save(msgspec.structs.replace(self.progress, complete=True))
        self._close()
        self.complete(assemble)

    def complete(self, assemble: Callable[[Path, Path], None] | None) -> None:
        """Do the last steps, again if necessary."""
        if self.part.exists():
            if assemble is not None:
                made = self.output.with_name(self.output.name + ".new")
                assemble(self.part, made)
                with made.open("rb+") as stream:
                    _to_disk(stream)
                made.replace(self.output)
                self.part.unlink()
            else:
                self.part.replace(self.output)
        if not self.progress.error_bytes:
            self.errors.unlink(missing_ok=True)
        self.checkpoint.unlink()

    def _close(self) -> None:
        self._part.close()
        self._errors.close()

    def _resume(self) -> None:
        try:
            found = msgspec.json.decode(self.checkpoint.read_bytes(), type=Progress)
        except UNREADABLE as error:
            raise click.ClickException(
                f"{self.checkpoint} is no checkpoint ({error}): remove it to start over"
            ) from None
        if found.identity != self.progress.identity:
            raise click.ClickException(
                f"{self.checkpoint} belongs to another job (input, model or protocol changed): remove it to start over"
            )
        self.progress = found
        self.resumed = True

    def _save(self, progress: Progress) -> None:
        new = self.checkpoint.with_name(self.checkpoint.name + ".new")
        with new.open("wb") as stream:
            stream.write(msgspec.json.encode(progress))
            _to_disk(stream)
        new.replace(self.checkpoint)
        directory = os.open(self.checkpoint.parent, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
        self.progress = progress


def _to_disk(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())
