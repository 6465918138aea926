"""OpenAI's files and batches, as its clients expect them."""

from __future__ import annotations

from time import time
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from carpool.policy.durations import Duration
from carpool_sidecar.http1.messages import find
from carpool_sidecar.jobs.api import submission
from carpool_sidecar.jobs.api.handling import Gauge, Handling, JobsPage, respond
from carpool_sidecar.jobs.api.shapes import shown_batch, shown_file, shown_list
from carpool_sidecar.jobs.api.upload import Upload
from carpool_sidecar.jobs.records import UNREADABLE, Refused
from carpool_sidecar.jobs.storage.files import Mark

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from carpool_sidecar.http1.server.exchange import Exchange
    from carpool_sidecar.jobs.desk import Desk
    from carpool_sidecar.jobs.records import File

    Work = Callable[[Exchange], Coroutine[None, None, None]]


class Wanted(Struct, frozen=True):
    """A requested batch."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None


_wanted = msgspec.json.Decoder(Wanted)


class OpenAI:
    """The handlers of each path."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def route(self, method: str, path: list[str]) -> Work:
        """Return the handler of a request; raises ``Refused``."""
        shape = (method, path[0], *(["ID"] if len(path) > 1 else []), *path[2:])
        routes: dict[tuple[str, ...], Work] = {
            ("GET", "files"): self._files,
            ("GET", "files", "ID"): self._file,
            ("GET", "files", "ID", "content"): self._content,
            ("DELETE", "files", "ID"): self._delete,
            ("POST", "batches"): self._create,
            ("GET", "batches"): self._batches,
            ("GET", "batches", "ID"): self._batch,
            ("POST", "batches", "ID", "cancel"): self._cancel,
        }
        if (work := routes.get(shape)) is None:
            raise Refused(404, "jobs-path", f"{method} /v1/{'/'.join(path)} is not served; docs/jobs.md lists what is")
        return work

    def upload(self, exchange: Exchange, handling: Handling) -> None:
        """Take a file as it comes."""
        self._desk.check_open()
        kind = find(exchange.headers, b"content-type") or b""
        owner = self._desk.owner(exchange)
        exchange.context = sink = Upload(self._desk, exchange, handling, kind, owner)
        exchange.stream(sink)

    async def _files(self, exchange: Exchange) -> None:
        desk, page = self._desk, JobsPage(exchange.query)
        owner = desk.owner_of(exchange)
        files, more = await desk.writer.do(lambda: desk.files.listed(owner, page.after, page.limit))
        respond(exchange, 200, shown_list([shown_file(file) for file in files], more))

    async def _file(self, exchange: Exchange) -> None:
        respond(exchange, 200, shown_file(await self._found(exchange)))

    async def _content(self, exchange: Exchange) -> None:
        """Send a file piece by piece, at the client's pace."""
        desk, file, gauge = self._desk, await self._found(exchange), Gauge()
        exchange.start(200, [(b"content-type", b"application/x-ndjson")], file.size, gauge)
        mark: Mark | None = Mark()
        while mark is not None and not exchange.ended:
            at = mark
            data, mark = await desk.writer.do(lambda at=at: desk.files.piece(file, at))  # type: ignore[misc] # bound now
            exchange.write(data)
            await gauge.wait()
        exchange.end()

    async def _delete(self, exchange: Exchange) -> None:
        desk, identity = self._desk, _identity(exchange)
        await desk.writer.do(lambda: desk.files.delete(identity))
        respond(exchange, 200, {"id": identity, "object": "file", "deleted": True})

    async def _create(self, exchange: Exchange) -> None:
        desk = self._desk
        desk.check_open()
        try:
            wanted = _wanted.decode(exchange.body)
            seconds = float(Duration.parse(wanted.completion_window))
        except (*UNREADABLE, ValueError) as error:
            raise Refused(400, "jobs-malformed", str(error)) from None
        submission.check_path(wanted.endpoint)
        metadata = msgspec.json.encode(wanted.metadata)
        if len(metadata) > 4096:
            raise Refused(400, "jobs-malformed", "metadata has over 4096 bytes")
        if seconds <= 0:
            raise Refused(400, "jobs-malformed", "completion_window is 0: write e.g. 24h")
        owner = desk.owner(exchange)
        batch = await desk.writer.do(
            lambda: desk.batches.create(
                wanted.input_file_id, wanted.endpoint, wanted.completion_window, seconds, metadata, owner, time()
            )
        )
        desk.runner.wake()
        respond(exchange, 200, shown_batch(batch))

    async def _batches(self, exchange: Exchange) -> None:
        desk, page = self._desk, JobsPage(exchange.query)
        owner = desk.owner_of(exchange)
        batches, more = await desk.writer.do(lambda: desk.batches.listed(owner, page.after, page.limit))
        respond(exchange, 200, shown_list([shown_batch(batch) for batch in batches], more))

    async def _batch(self, exchange: Exchange) -> None:
        desk, identity = self._desk, _identity(exchange)
        respond(exchange, 200, shown_batch(await desk.writer.do(lambda: desk.batches.get(identity))))

    async def _cancel(self, exchange: Exchange) -> None:
        desk, identity = self._desk, _identity(exchange)
        respond(exchange, 200, shown_batch(await desk.writer.do(lambda: desk.batches.cancel(identity, time()))))

    async def _found(self, exchange: Exchange) -> File:
        desk, identity = self._desk, _identity(exchange)
        return await desk.writer.do(lambda: desk.files.get(identity))


def _identity(exchange: Exchange) -> str:
    return exchange.path.decode("latin-1").rstrip("/").split("/")[3]
