"""The engine's server as a process: ``python -m carpool_sidecar.llm.main CONFIG ADDRESS``.

CONFIG is the field ``llm`` of a configuration, as JSON; ADDRESS is ``host:port`` or ``unix:/path``. It ends with its
input, so it doesn't outlive who started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from carpool_sidecar.config.settings import Llm, address_of
from carpool_sidecar.http1.limits import ServerLimits
from carpool_sidecar.http1.server.server import Server
from carpool_sidecar.llm.app import EngineApp
from carpool_sidecar.llm.messages import Ready
from carpool_sidecar.llm.process import FOLDER
from carpool_sidecar.llm.requests import LARGEST_BODY
from carpool_sidecar.llm.worker_link import CannotLoadError, WorkerLink
from carpool_sidecar.logs import set_up

if TYPE_CHECKING:
    from carpool_sidecar.llm.messages import Reply

OK, WRONG_CONFIG = 0, 2
"""Exit codes: its input has ended; the model can't be loaded, with the reason on standard output."""


async def serve(config: Llm, address: str) -> int:
    """Serve until standard input ends; returns the exit code."""
    log = logging.getLogger("carpool.engine")

    def heard(reply: Reply) -> None:
        if isinstance(reply, Ready):
            log.info("the model is loaded", extra={"context": reply.context, "kvTokens": reply.kv_tokens})
            if reply.longest_text is not None:
                log.warning(
                    "texts of more tokens get 400: send them as token ids", extra={"tokens": reply.longest_text}
                )
        app.heard(reply)

    link = WorkerLink(config, heard, lambda: app.lost(), log)  # noqa: PLW0108 - each has the other
    app = EngineApp(config.model, link.send, rng=random.SystemRandom())
    server = Server(app, ServerLimits(max_body_bytes=LARGEST_BODY))
    if address.startswith("unix:"):
        await server.listen_unix(address.removeprefix("unix:"))
    else:
        await server.listen(*address_of(address))
    log.info("the engine listens", extra={"address": str(server.addresses[0])})
    loop = asyncio.get_running_loop()
    parent = asyncio.Event()
    loop.add_reader(0, lambda: None if os.read(0, 4096) else parent.set())
    running, over = loop.create_task(link.run()), loop.create_task(parent.wait())
    try:
        await asyncio.wait({running, over}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    except CannotLoadError as error:
        sys.stdout.write(f"{error}\n")
        return WRONG_CONFIG
    finally:
        loop.remove_reader(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        server.stop_accepting()
        server.abort()
        if parent.is_set():
            _remove(address)
    return OK


def _remove(address: str) -> None:
    """Remove the socket in the sidecar's folder: if that was killed, nobody else does."""
    socket = Path(address.removeprefix("unix:"))
    if socket.parent.name.startswith(FOLDER):
        with contextlib.suppress(OSError):
            socket.unlink(missing_ok=True)
            socket.parent.rmdir()


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    set_up("Info")
    config = Llm.of_argument(arguments[0])
    return uvloop.run(serve(config, arguments[1]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
