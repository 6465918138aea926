"""Limits on what one client or one upstream may use of this process: sizes in bytes, times in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits of a server. A refusal names the limit as here, or as in the configuration if it can be set there."""

    max_connections: int = 16_384
    """Connections at a time. One more replaces the client that has been idle for longest. If every client waits for an
    answer or sends a body, the new connection is answered with 503."""
    max_pipelined: int = 8
    """Requests of one connection that wait for answers; with so many, the connection is not read."""
    max_target_bytes: int = 8 * 1024
    """The request target; 414."""
    max_head_bytes: int = 32 * 1024
    """The whole head; 431."""
    max_headers: int = 128
    """Field lines; 431."""
    max_body_bytes: int = 64 * 1024 * 1024
    """A buffered body for which the application set no limit of its own; 413."""
    max_buffered_bytes: int = 512 * 1024 * 1024
    """Memory for all buffered bodies and unread answers; 503. The sidecar also counts upstream answers."""
    head_timeout: float = 10.0
    """From a head's first byte to its last; 408."""
    body_timeout: float = 30.0
    """For a body at `min_body_rate`; 408. Time during which the application pauses the body does not count."""
    min_body_rate: float = 1024.0
    """Bytes per second: each time so many bytes were received, `body_timeout` is extended by a second."""
    idle_timeout: float = 75.0
    """Between an answer and the next request; the connection is closed. 75 s is more than the 60 s of most load
    balancers, so that they close first and no request meets a closing connection."""
    write_timeout: float = 30.0
    """Time in which a client reads nothing of its answer; the connection is cut."""
    write_buffer_bytes: int = 64 * 1024
    """Unsent bytes from which on a streamed answer is paused."""
    drain_bytes: int = 64 * 1024
    """Up to this size the unread rest of a body is skipped, to keep the connection; else the connection closes."""
    linger_timeout: float = 2.0
    """After a final answer with input still coming: how long to read on, so that the answer is not lost to a reset."""
    patience: float = 5.0
    """While there is no room for more bodies: how long a client may take to send a body or to read its answer, and how
    long requests may wait behind another of their connection. Then the one that holds most memory is cut."""
    turn: float = 0.002
    """How long requests after each connection's first are read in one pass of the event loop."""
    tick: float = 0.25
    """How often deadlines are looked at; a timeout is up to this much longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """Limits of a pool."""

    max_head_bytes: int = 64 * 1024
    """A response's head."""
    max_body_bytes: int = 256 * 1024 * 1024
    """A response's body where it is buffered."""
    max_interim: int = 64
    """Interim responses (1xx) before an answer; more are a protocol error."""
    write_buffer_bytes: int = 64 * 1024
    """Unsent bytes from which on a streamed request is paused."""
    fresh: float = 0.75
    """Seconds for which an idle connection may be used for a request that can't be sent again. The upstream may close
    it as the request arrives: servers do so after whole seconds (gunicorn 2, uvicorn and Node.js 5; the shortest
    setting is 1)."""
    turn: float = 0.002
    """How long chunks after each connection's first 1,000 are read in one pass of the event loop."""
    tick: float = 0.1
    """How often deadlines are looked at; a timeout is up to this much longer."""
