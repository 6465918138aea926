"""The pod network: a bridge in the cluster's network namespace, and for each pod a namespace joined by veth."""

from __future__ import annotations

import asyncio

from minicluster.controlplane import ADDRESS

BRIDGE = "pods0"
PREFIX = 16  # 10.244.0.0/16


class NetworkError(Exception):
    """A program that makes the network failed; the message is its own."""


async def command(*argv: str, text: str = "") -> str:
    """Run a command with text on its standard input and return its output.

    Raises:
        NetworkError: It failed.
    """
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate(text.encode())
    if process.returncode:
        raise NetworkError(f"{' '.join(argv)}: {errors.decode().strip()}")
    return output.decode()


async def make_bridge() -> None:
    """Bring up loopback and the bridge of the namespace that we are in."""
    await command(
        "ip",
        "-batch",
        "-",
        text=f"link set lo up\nlink add {BRIDGE} type bridge\n"
        f"addr add {ADDRESS}/{PREFIX} dev {BRIDGE}\nlink set {BRIDGE} up\n",
    )
