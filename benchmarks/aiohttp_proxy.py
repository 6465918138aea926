"""A reverse proxy of aiohttp's server and client, as one writes it first: the peer that `run.py` compares with."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from aiohttp import ClientSession, TCPConnector, web

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SESSION = web.AppKey("session", ClientSession)
HOP_BY_HOP = frozenset({"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "content-length"})


def application(upstream: int) -> web.Application:
    """Forward everything to a port of this host."""

    async def session(app: web.Application) -> AsyncIterator[None]:
        async with ClientSession(connector=TCPConnector(limit=0), auto_decompress=False) as app[SESSION]:
            yield

    async def forward(request: web.Request) -> web.Response:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        url = f"http://127.0.0.1:{upstream}{request.path_qs}"
        async with request.app[SESSION].request(
            request.method, url, headers=headers, data=await request.read()
        ) as answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}
            return web.Response(status=answer.status, headers=kept, body=await answer.read())

    app = web.Application(client_max_size=1 << 30)
    app.cleanup_ctx.append(session)
    app.router.add_route("*", "/{path:.*}", forward)
    return app


if __name__ == "__main__":
    web.run_app(application(int(sys.argv[2])), host="127.0.0.1", port=int(sys.argv[1]), access_log=None, print=None)
