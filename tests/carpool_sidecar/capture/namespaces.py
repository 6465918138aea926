"""A network namespace with servers in it, and questions asked from it."""

from __future__ import annotations

import json
import subprocess
import sys

SERVE = """
import asyncio, json, sys

async def main():
    servers = []
    for name, port in json.loads(sys.argv[1]).items():
        async def answer(reader, writer, name=name):
            writer.write(name.encode())
            await writer.drain()
            writer.close()
        servers.append(await asyncio.start_server(answer, None, port))
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
ASK = """
import json, socket, sys

said = []
for host, port in json.loads(sys.argv[1]):
    try:
        with socket.create_connection((host, port), timeout=10) as there:
            said.append(there.recv(100).decode())
    except OSError as error:
        said.append(type(error).__name__)
print(json.dumps(said))
"""


def namespaces_allowed():
    """Why this machine lets nobody make network namespaces; "" where it does."""
    try:
        tried = subprocess.run(
            ["unshare", "--net", "ip", "link", "add", "name", "one", "type", "veth", "peer", "name", "two"],  # noqa: S607
            capture_output=True, text=True, check=False, timeout=30,
        )  # fmt: skip
    except OSError as error:
        return f"no unshare or no ip: {error}"
    return tried.stderr.strip() if tried.returncode else ""


class Namespace:
    """One that lasts as long as this."""

    def __init__(self):
        self._holder = subprocess.Popen(
            ["unshare", "--net", sys.executable, "-c", "print(flush=True); input()"],  # noqa: S607
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._holder.stdout.readline()
        self.pid = self._holder.pid
        self._servers = []

    def command(self, *argv):
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", *argv]

    def run(self, *argv, check=True):
        return subprocess.run(  # noqa: S603
            self.command(*argv), capture_output=True, text=True, check=check, timeout=60
        )

    def serve(self, **ports):
        """Answer each connection to a port, on all addresses, with a name."""
        command = self.command(sys.executable, "-c", SERVE, json.dumps(ports))
        server = subprocess.Popen(command, stdout=subprocess.PIPE)  # noqa: S603
        assert server.stdout.readline() == b"ready\n"
        self._servers.append(server)

    def ask(self, *addresses):
        """What answers at each (host, port)."""
        return json.loads(self.run(sys.executable, "-c", ASK, json.dumps(addresses)).stdout)

    def close(self):
        for each in (*self._servers, self._holder):
            each.kill()
            each.wait()
            each.stdout.close()
        self._holder.stdin.close()


def cable(caller, pod):
    """Connect two of them: ``caller`` has the addresses 10.99.0.1 and fd99::1, ``pod`` 10.99.0.2 and fd99::2."""
    caller.run("ip", "link", "add", "name", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(pod.pid))
    for end, number in ((caller, 1), (pod, 2)):
        end.run("ip", "link", "set", "lo", "up")
        end.run("ip", "addr", "add", f"10.99.0.{number}/24", "dev", "eth0")
        end.run("ip", "addr", "add", f"fd99::{number}/64", "dev", "eth0", "nodad")
        end.run("ip", "link", "set", "eth0", "up")
