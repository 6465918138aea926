"""Shares out the process's open-file limit, so that accepting a connection never fails for lack of a file."""

from __future__ import annotations

import resource
from typing import NamedTuple

ADMIN_CONNECTIONS = 64
"""Connections to the admin port at a time."""

MOST_CLIENTS = 16_384
"""Most connections to the data port at a time, even with a higher file limit: each costs 10 KiB."""

OTHERS = 128
"""Files of the process itself: logs, listening sockets, the tuner, the sidecar's own questions, probes."""

BACKLOG = 1024
"""Connections that are accepted in one pass of the loop, before the ones that they replace are closed."""


class Shares(NamedTuple):
    """Most connections of each kind."""

    clients: int
    forwarded: int
    backlog: int


def share(files: int, inference: int, forwarded: int) -> Shares:
    """Share out ``files``; ``inference`` and ``forwarded``: the requested connections to the upstream.

    Inference gets all it requests. If there are too few files, clients and forwarded connections get equal parts, since
    a forwarded request needs one of each. Each kind gets at least 16: a process with fewer files
    can only refuse.
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
    """Raise the limit of open files as far as allowed.

    The soft limit of 1,024 protects programs that can't count further; this one can.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
