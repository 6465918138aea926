"""An application of a server that forwards all that comes."""

from __future__ import annotations

from carpool_sidecar.http1.relay.forward import Forwarding


class ForwardAll:
    """Forwards every request to the upstream of ``pool``."""

    def __init__(self, pool, timeout=60.0):
        self._pool = pool
        self._timeout = timeout

    def head(self, exchange):
        exchange.context = Forwarding(exchange, self._pool, self._timeout)
        exchange.context.begin()

    def request(self, exchange):
        exchange.context.request()

    def sent(self, exchange): ...

    def disconnected(self, exchange):
        exchange.context.cancel()

    def refused(self, error): ...
