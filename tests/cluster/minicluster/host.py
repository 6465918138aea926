"""The first process of a cluster's namespaces: starts the control plane and is the node.

Started by ``Cluster`` as ``unshare --net --pid --mount ... python -m minicluster.host FOLDER``. Everything of the
cluster descends from it, in its process namespace: when it ends, however it ends, the kernel ends all of it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
import threading
from pathlib import Path

from minicluster import network
from minicluster.client import Client
from minicluster.controlplane import SERVER, ControlPlane
from minicluster.node import Node


def _end_with_parent(folder: Path) -> None:
    """End when standard input does: the parent process is gone, perhaps killed. A thread waits for no loop."""
    os.read(0, 1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


async def _run(folder: Path) -> None:
    await network.make_bridge()
    plane = ControlPlane(folder)
    await plane.start()
    async with Client(SERVER, plane.node_token, plane.authority.path) as client:
        node = Node(client, folder)
        await node.register()
        sys.stdout.write("serving\n")
        sys.stdout.flush()
        await node.run()


def main() -> None:
    """Run until standard input ends."""
    folder = Path(sys.argv[1])
    logging.basicConfig(
        filename=folder / "node.log", level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    asyncio.run(_run(folder))


if __name__ == "__main__":
    main()
