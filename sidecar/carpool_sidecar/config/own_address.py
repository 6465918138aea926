"""Refuses an upstream that is the sidecar itself: each request would return to it until no connection is left."""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING

from carpool.policy.plain import PolicyError
from carpool_sidecar.config.settings import address_of

if TYPE_CHECKING:
    from carpool_sidecar.config.settings import Upstream

LOCAL4, LOCAL6 = "127.0.0.1", "::1"

EVERYWHERE = {"*": ("127.", LOCAL6), "0.0.0.0": ("127.",), "::": (LOCAL6,)}  # noqa: S104 - compared, not bound
"""Hosts that listen on every address, with the prefixes of the loopback addresses that each includes."""


def refuse(upstream: Upstream | None, listen: str, admin: str) -> None:
    """Refuse an upstream that is the data port or the admin port (both ``host:port``).

    Names are not looked up: only those of this machine's loopback are known. Raises ``PolicyError``.
    """
    if upstream is None:
        return
    host, port, _ = upstream.address
    for field, address in (("listen", listen), ("admin", admin)):
        own, own_port = address_of(address)
        if port and port == own_port and _is_reached(own, _addresses(host)):
            what = "data port" if field == "listen" else "admin port"
            raise PolicyError(
                "upstream.url",
                f"{upstream.url!r} is this sidecar's own {what} ({field}: {address}): name the model server's port, or "
                f"change {field}",
            )


def _is_reached(own: str, addresses: set[str]) -> bool:
    """Whether a connection to one of the addresses reaches the host that the sidecar listens on."""
    if own in EVERYWHERE:
        return any(each.startswith(EVERYWHERE[own]) for each in addresses)
    return not addresses.isdisjoint(_addresses(own))


def _addresses(host: str) -> set[str]:
    """Return the addresses that a connection to a host may go to."""
    if host.lower() == "localhost":
        return {LOCAL4, LOCAL6}
    try:
        address = ip_address(host)
    except ValueError:
        return {host.lower()}
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_unspecified:  # Linux connects to its loopback then
        return {LOCAL4 if address.version == 4 else LOCAL6}
    return {str(address)}
