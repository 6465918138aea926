"""How the files that a process may have open are shared out: accepting a connection must never fail for want of one."""

from __future__ import annotations

import resource
from typing import NamedTuple

ADMIN_CONNECTIONS = 64
"""Connections to the admin port at a time."""

MOST_CLIENTS = 16_384
"""Connections to the data port at a time, however many files there may be: each costs 10 KiB."""

OTHERS = 128
"""Files of the process itself: logs, listening sockets, the tuner, the sidecar's own questions, probes."""

BACKLOG = 1024
"""Connections that are accepted in one pass of the loop, before those that they take the place of are closed."""


class Shares(NamedTuple):
    """How many connections each may have."""

    clients: int
    forwarded: int
    backlog: int


def share(files: int, inference: int, forwarded: int) -> Shares:
    """Share out ``files``, where ``inference`` and ``forwarded`` connections to the upstream are wanted.

    Inference gets what it wants. Where there are too few for all, a forwarded request needs one connection of a client
    and one to the upstream, so these get equal parts. Nobody gets fewer than 16: a process that may not even open those
    files can only refuse.
    """
    left = files - OTHERS - ADMIN_CONNECTIONS - inference
    backlog = max(16, min(BACKLOG, left // 8))
    left -= backlog
    forwarded = min(forwarded, max(16, left // 2))
    return Shares(max(16, min(MOST_CLIENTS, left - forwarded)), forwarded, backlog)


def open_files() -> int:
    """Return how many files this process may have open now."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_limit() -> None:
    """Let this process have as many files open as it may.

    The soft limit of 1,024 protects programs that can't count further; this one can.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
