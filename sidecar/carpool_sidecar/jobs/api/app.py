"""The jobs' interface on the data port: ``/v1/jobs``, and OpenAI's ``/v1/files`` and ``/v1/batches``."""

from __future__ import annotations

import hmac
from time import time
from typing import TYPE_CHECKING

from carpool_sidecar.http1.memory import count_while_alive, counts_itself
from carpool_sidecar.http1.messages import find
from carpool_sidecar.jobs.api import submission
from carpool_sidecar.jobs.api.handling import Handling, JobsPage, no_room, respond
from carpool_sidecar.jobs.api.openai import OpenAI
from carpool_sidecar.jobs.api.shapes import shown_job
from carpool_sidecar.jobs.records import Refused, State

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from carpool_sidecar.http1.memory import Budget
    from carpool_sidecar.http1.server.exchange import Exchange
    from carpool_sidecar.jobs.desk import Desk

    Work = Callable[[Exchange], Coroutine[None, None, None]]


class JobsApp:
    """Routes exchanges. Everything that touches the disk is awaited; the loop goes on meanwhile."""

    def __init__(self, desk: Desk, budget: Budget) -> None:
        self._desk = desk
        self._budget = budget
        self._openai = OpenAI(desk)

    def serves(self, path: bytes) -> bool:
        """Whether a path is one of these."""
        text = path.decode("latin-1")
        return any(text == own or text.startswith(f"{own}/") for own in submission.OURS)

    def head(self, exchange: Exchange) -> None:
        """Choose what to do with a request, in ``Application.head``."""
        path = exchange.path.decode("latin-1").rstrip("/").split("/")[2:]
        openai = path[0] != "jobs"
        handling = exchange.context = Handling(exchange, _nothing, openai=openai)
        try:
            self._admit(exchange)
            method = exchange.method.decode("latin-1")
            if openai and (method, path) == ("POST", ["files"]):
                self._openai.upload(exchange, handling)
                return
            work = self._openai.route(method, path) if openai else self._route(method, path)
        except Refused as refused:
            handling.refuse(refused)
            return
        exchange.context = Handling(exchange, work, openai=openai)
        exchange.buffer(int(self._desk.settings.max_request))

    def _admit(self, exchange: Exchange) -> None:
        """Refuse callers without the sidecar's own credential for the model, if it has one."""
        needed = self._desk.credential
        given = find(exchange.headers, b"authorization") or b""
        if needed is not None and not hmac.compare_digest(given, needed):
            raise Refused(401, "jobs-key", "send the Authorization header that jobs.authorizationFile names")

    def _route(self, method: str, path: list[str]) -> Work:
        routes: dict[tuple[str, int], Work] = {
            ("POST", 1): self._submit,
            ("GET", 1): self._list,
            ("GET", 2): self._show,
            ("DELETE", 2): self._cancel,
        }
        if len(path) == 3 and path[2] == "result" and method == "GET":
            return self._result
        work = routes.get((method, len(path)))
        if work is None:
            text = "there are POST and GET /v1/jobs, GET and DELETE /v1/jobs/ID, GET /v1/jobs/ID/result"
            methods = ", ".join(known for known, length in routes if length == len(path))
            raise Refused(405 if methods else 404, "jobs-path", text, methods)
        return work

    async def _submit(self, exchange: Exchange) -> None:
        """Accept a job: the answer is sent once it is on disk."""
        desk = self._desk
        desk.check_open()
        call = submission.read(exchange.body)
        owner = desk.owner(exchange)
        job = await desk.writer.do(lambda: desk.store.submit(call, owner, time()))
        desk.runner.wake()
        respond(exchange, 202, shown_job(job), [(b"location", f"/v1/jobs/{job.id}".encode())])

    async def _list(self, exchange: Exchange) -> None:
        desk, page = self._desk, JobsPage(exchange.query)
        owner = desk.owner_of(exchange)
        jobs, more = await desk.writer.do(lambda: desk.store.listed(owner, page.after, page.limit))
        respond(exchange, 200, {"data": [shown_job(job) for job in jobs], "hasMore": more})

    async def _show(self, exchange: Exchange) -> None:
        desk, identity = self._desk, _identity(exchange)
        respond(exchange, 200, shown_job(await desk.writer.do(lambda: desk.store.get(identity))))

    async def _cancel(self, exchange: Exchange) -> None:
        """Cancel a job, or forget one that has ended."""
        desk, identity = self._desk, _identity(exchange)
        cancelled = await desk.writer.do(lambda: desk.store.cancel(identity, time()))
        if cancelled.running is not None:
            desk.runner.flights.cancel(cancelled.running)
        respond(exchange, 200, shown_job(cancelled.job) | ({"deleted": True} if cancelled.forgotten else {}))

    async def _result(self, exchange: Exchange) -> None:
        """Send the model's answer unchanged. It is counted as held before it is read."""
        desk, identity = self._desk, _identity(exchange)
        size = await desk.writer.do(lambda: desk.store.answer_size(identity))
        if not exchange.charge(size):
            raise no_room("the result")
        found = await desk.writer.do(lambda: None if exchange.ended else desk.store.answer(identity))
        if found is None:
            return  # the client left
        job, answer = found
        if answer is not None:
            if counts_itself(answer.body):
                count_while_alive(answer.body, self._budget)
            exchange.respond(answer.status, answer.headers, answer.body)
        elif job.state in {State.QUEUED, State.RUNNING}:
            text = f"the job is {job.state}: ask again"
            exchange.fail(409, "jobs-not-finished", text, [(b"retry-after", b"1")])
        else:
            why = "" if job.reason in {None, str(job.state)} else f": {job.reason}"
            exchange.fail(410, f"jobs-{job.state}", f"the job has no answer, it is {job.state}{why}")


def _identity(exchange: Exchange) -> str:
    return exchange.path.decode("latin-1").rstrip("/").split("/")[3]


async def _nothing(_: Exchange) -> None:
    """Do nothing: the request was refused."""
