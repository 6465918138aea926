"""The pod network: a bridge in the cluster's network namespace, and for each pod a namespace joined by veth."""

from __future__ import annotations

import asyncio
import itertools

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


class PodNetwork:
    """A pod's network namespace, kept open by a process that sleeps, as the pause container does."""

    _numbers = itertools.count(2)

    def __init__(self, ip: str, holder: asyncio.subprocess.Process) -> None:
        self.ip = ip
        self._holder = holder

    @property
    def path(self) -> str:
        """The namespace, as a file to enter."""
        return f"/proc/{self._holder.pid}/ns/net"

    @classmethod
    async def make(cls) -> PodNetwork:
        """Make one, joined to the bridge by an address that no pod had before (in the first 60,000 pods)."""
        number = next(n for n in cls._numbers if 0 < n % 256 < 255) % 65536
        ip = f"10.244.{number >> 8}.{number & 255}"
        holder = await asyncio.create_subprocess_exec(
            "unshare", "--net", "sh", "-c", "echo; exec sleep infinity", stdout=asyncio.subprocess.PIPE
        )
        made = cls(ip, holder)
        try:
            assert holder.stdout
            await holder.stdout.readline()
            veth = f"pod{number}"
            await command(
                "ip",
                "-batch",
                "-",
                text=f"link add {veth} type veth peer name eth0 netns {holder.pid}\n"
                f"link set {veth} master {BRIDGE} up\n",
            )
            inside = f"link set lo up\naddr add {ip}/{PREFIX} dev eth0\nlink set eth0 up\n"
            await command("nsenter", f"--net={made.path}", "ip", "-batch", "-", text=inside)
        except BaseException:
            await made.close()
            raise
        return made

    async def close(self) -> None:
        """Let the namespace go; the kernel takes its devices with it once no process is in it."""
        if self._holder.returncode is None:
            self._holder.kill()
        await self._holder.wait()
