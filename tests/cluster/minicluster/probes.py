"""Probes and lifecycle hooks: the same actions, asked from the node."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import aiohttp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from minicluster.client import Object
    from minicluster.container import Process


class Actions:
    """What can be asked of one running container."""

    def __init__(self, container: Object, ip: str, process: Process, session: aiohttp.ClientSession) -> None:
        self._ports = {port["name"]: port["containerPort"] for port in container.get("ports", ()) if "name" in port}
        self._ip = ip
        self._process = process
        self._session = session

    async def act(self, action: Object, seconds: float) -> str:
        """Do what a kubelet's probe or hook says, within a time; return what is wrong, empty when nothing is."""
        try:
            async with asyncio.timeout(seconds):
                if one := action.get("httpGet"):
                    return await self._http(one)
                if one := action.get("tcpSocket"):
                    _, writer = await asyncio.open_connection(one.get("host", self._ip), self._port(one["port"]))
                    writer.close()
                    with suppress(OSError):
                        await writer.wait_closed()
                    return ""
                if one := action.get("exec"):
                    code = await self._process.run(one["command"])
                    return f"command exited with {code}" if code else ""
                if one := action.get("sleep"):
                    await asyncio.sleep(one["seconds"])
                    return ""
        except TimeoutError:
            return f"no answer within {seconds:g} s"
        except (OSError, aiohttp.ClientError, KeyError) as error:
            return f"{type(error).__name__}: {error}"
        return f"this node cannot do {', '.join(action)}"

    async def _http(self, one: Object) -> str:
        headers = {header["name"]: header["value"] for header in one.get("httpHeaders", ())}
        scheme, host = one.get("scheme", "HTTP").lower(), one.get("host", self._ip)
        url = f"{scheme}://{host}:{self._port(one['port'])}{one.get('path', '/')}"
        async with self._session.get(url, headers=headers, ssl=False, allow_redirects=False) as answer:
            return "" if 200 <= answer.status < 400 else f"HTTP probe failed with statuscode: {answer.status}"

    def _port(self, port: int | str) -> int:
        """Return a port's number; names are of this container's own ports, as the kubelet has it."""
        return port if isinstance(port, int) else self._ports[port]


async def verdicts(probe: Object, actions: Actions) -> AsyncIterator[str]:
    """Probe for ever; yield what is wrong (empty: nothing) each time that a threshold is reached."""
    await asyncio.sleep(probe.get("initialDelaySeconds", 0))
    last, count = None, 0
    while True:
        wrong = await actions.act(probe, probe.get("timeoutSeconds", 1))
        count = count + 1 if bool(wrong) == last else 1
        last = bool(wrong)
        if count >= probe.get("failureThreshold" if wrong else "successThreshold", 3 if wrong else 1):
            yield wrong
        await asyncio.sleep(probe.get("periodSeconds", 10))


def new_session() -> aiohttp.ClientSession:
    """Return what probes are asked through: a connection each, as the kubelet's."""
    return aiohttp.ClientSession(
        headers={"User-Agent": "kube-probe/1.35", "Connection": "close"},
        connector=aiohttp.TCPConnector(force_close=True, limit=0),
        auto_decompress=False,
    )
