"""What all kinds of policies have in common: rules that admit or reject traffic of peers to ports."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from carpool_cli.manifest_checks.objects import Json, Peer

INGRESS, EGRESS = "ingress", "egress"

ADMIN, DEFAULT, BASELINE = 1e3, 1e6, 1e7
"""Order of the tiers that each cluster has, with Calico's numbers: AdminNetworkPolicies, policies of namespaces, and
the BaselineAdminNetworkPolicy. A tier decides before those with higher numbers."""

BEYOND = 65536
"""An invalid port number: searching a list for it reads the whole list."""


class Rule(Protocol):
    """One rule of a policy."""

    @property
    def title(self) -> str:
        """Kind and name of its policy, for a message."""

    @property
    def namespace(self) -> str:
        """The namespace of its policy; ``""`` for the whole cluster."""

    @property
    def certain(self) -> bool:
        """Whether it surely applies to the checked pod: it may depend on unknown properties."""

    @property
    def denies(self) -> bool:
        """Whether it rejects the traffic that it matches."""

    @property
    def passes(self) -> bool:
        """Whether it leaves the traffic that it matches to the next tier."""

    @property
    def tier(self) -> float:
        """The order of its tier."""

    @property
    def order(self) -> tuple[float, str]:
        """The order of its policy in its tier: lower ones decide first."""

    @property
    def pods(self) -> list[Json] | None:
        """The peers, as selectors of namespaces and pods; None if they are written in another way."""

    @property
    def open_to_all(self) -> bool:
        """Whether it matches every peer."""

    @property
    def by_address(self) -> bool:
        """Whether it names addresses of peers that are pods."""

    def covers(self, port: int, named: dict[str, int]) -> bool:
        """Whether it matches a port of a pod; ``named``: that pod's ports by name."""

    def leaves_out(self, port: int) -> bool:
        """Whether it matches all ports except some, and this one is among those."""

    def includes(self, other: Rule) -> bool:
        """Whether it surely matches all peers of ``other``, too."""

    def reaches(self, pod: Peer) -> bool:
        """Whether it surely matches a pod as peer; a pod without known addresses, wherever it runs."""

    def may_reach(self, pod: Peer) -> bool:
        """Whether it may match a pod as peer, as far as known."""

    def for_all_pods_of(self, other: Rule) -> bool:
        """Whether its policy surely selects all pods that the policy of ``other`` selects."""

    def patched(self, port: int, like: int, named: dict[str, int]) -> str:
        """Return the command that treats one more port like one that it lists, or excludes."""


class Closing(NamedTuple):
    """A policy that isolates a pod in its tier: only matched traffic is admitted."""

    title: str
    tier: float = DEFAULT


class Policies(NamedTuple):
    """The policies for a pod. ``perhaps``: those that would isolate it, but may apply to other pods only."""

    closing: list[Closing]
    rules: list[Rule]
    perhaps: Sequence[Closing] = ()


def all_in(inner: list[Json], outer: list[Json]) -> bool:
    """Whether all pods of some selectors are surely among those of others; without selectors that is unknown."""
    ends = ("namespaceSelector", "podSelector")
    return bool(inner) and all(
        any(all(requirements(wide[end]) <= requirements(narrow[end]) for end in ends) for wide in outer)
        for narrow in inner
    )


def namespace_of(policy: Json) -> str:
    """Return the namespace of a policy; ``""`` for the whole cluster."""
    return str(policy["metadata"].get("namespace", ""))


def requirements(selector: Json) -> set[tuple[str, str, tuple[str, ...]]]:
    """Return the requirements of a label selector. One with fewer requirements selects more."""
    labels = {(key, "In", (value,)) for key, value in (selector.get("matchLabels") or {}).items()}
    return labels | {
        (each["key"], each["operator"], tuple(sorted(each.get("values") or [])))
        for each in selector.get("matchExpressions") or []
    }
