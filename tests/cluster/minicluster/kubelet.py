"""The node's own HTTPS port, which the API server asks for logs. There is no exec and no port-forward."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING

from aiohttp import web

from minicluster.controlplane import ADDRESS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from minicluster.pod import PodRunner

PORT = 10250
# How often a file that is followed is looked at.
LOOK = 0.1


async def serve(folder: Path, find: Callable[[str, str], PodRunner | None]) -> None:
    """Serve for ever, to clients with a certificate of the cluster's authority."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=folder / "ca.crt")
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(folder / "kubelet.crt", folder / "kubelet.key")

    async def logs(request: web.Request) -> web.StreamResponse:
        runner = find(request.match_info["namespace"], request.match_info["pod"])
        file = runner and runner.log(request.match_info["container"], previous="previous" in request.query)
        if not runner or not file or not file.exists():
            raise web.HTTPNotFound(text="no such log on this node")
        answer = web.StreamResponse()
        await answer.prepare(request)
        with file.open("rb") as lines:
            text = lines.read()
            if tail := request.query.get("tailLines"):
                text = b"".join(text.splitlines(keepends=True)[-int(tail) :]) if int(tail) else b""
            await answer.write(text)
            while "follow" in request.query and not runner.finished:
                await asyncio.sleep(LOOK)
                await answer.write(lines.read())
        return answer

    app = web.Application()
    app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", logs)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, ADDRESS, PORT, ssl_context=context).start()
