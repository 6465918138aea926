"""What all kinds of policies have in common: rules that admit ports, or refuse them, to somebody."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from carpool_cli.kubectl.preflight.scene import Json, Peer

INGRESS, EGRESS = "ingress", "egress"

ADMIN, DEFAULT, BASELINE = 1e3, 1e6, 1e7
"""Places of the tiers that each cluster has, as Calico numbers them: AdminNetworkPolicies, policies of namespaces, and
the BaselineAdminNetworkPolicy. A tier decides before those with higher numbers."""

BEYOND = 65536
"""No port: whether it is in a list takes reading the whole list."""


class Rule(Protocol):
    """One rule of a policy."""

    @property
    def title(self) -> str:
        """Kind and name of its policy, for a message."""

    @property
    def namespace(self) -> str:
        """The namespace of its policy; ``""`` where that is for the whole cluster."""

    @property
    def certain(self) -> bool:
        """Whether it surely is for the pod that is looked at: it may go by what is not known of that."""

    @property
    def denies(self) -> bool:
        """Whether it refuses what it is for."""

    @property
    def passes(self) -> bool:
        """Whether it leaves what it is for to the next tier."""

    @property
    def tier(self) -> float:
        """The place of its tier."""

    @property
    def order(self) -> tuple[float, str]:
        """The place of its policy in its tier: one decides before those that are greater."""

    @property
    def pods(self) -> list[Json] | None:
        """Who is at the other end, as selectors of namespaces and pods; None where that is written in another way."""

    @property
    def open_to_all(self) -> bool:
        """Whether it is for everybody at the other end."""

    @property
    def by_address(self) -> bool:
        """Whether it names addresses of pods at the other end."""

    def covers(self, port: int, named: dict[str, int]) -> bool:
        """Whether it is for a port of a pod; ``named``: that pod's ports by name."""

    def leaves_out(self, port: int) -> bool:
        """Whether it is for all ports but some, and this one is among those."""

    def includes(self, other: Rule) -> bool:
        """Whether everyone at the other end of ``other`` is surely at the end of this, too."""

    def reaches(self, pod: Peer) -> bool:
        """Whether a pod is surely at the other end; of one without addresses, wherever it runs."""

    def may_reach(self, pod: Peer) -> bool:
        """Whether a pod may be at the other end, as far as is known."""

    def for_all_pods_of(self, other: Rule) -> bool:
        """Whether its policy surely selects all pods that the policy of ``other`` does."""

    def patched(self, port: int, like: int, named: dict[str, int]) -> str:
        """Return the command by which it treats one more port as one that it covers, or leaves out."""


class Closing(NamedTuple):
    """A policy by which a pod admits in its tier only what is named."""

    title: str
    tier: float = DEFAULT


class Policies(NamedTuple):
    """What policies say of a pod. ``perhaps``: those that would close it, and may be for other pods."""

    closing: list[Closing]
    rules: list[Rule]
    perhaps: Sequence[Closing] = ()


def all_in(inner: list[Json], outer: list[Json]) -> bool:
    """Whether all pods that some selectors select are surely among those of others; of none nothing is known."""
    ends = ("namespaceSelector", "podSelector")
    return bool(inner) and all(
        any(all(requirements(wide[end]) <= requirements(narrow[end]) for end in ends) for wide in outer)
        for narrow in inner
    )


def namespace_of(policy: Json) -> str:
    """Return the namespace of a policy; ``""`` where it is for the whole cluster."""
    return str(policy["metadata"].get("namespace", ""))


def requirements(selector: Json) -> set[tuple[str, str, tuple[str, ...]]]:
    """Return what a label selector demands. One that demands less selects more."""
    labels = {(key, "In", (value,)) for key, value in (selector.get("matchLabels") or {}).items()}
    return labels | {
        (each["key"], each["operator"], tuple(sorted(each.get("values") or [])))
        for each in selector.get("matchExpressions") or []
    }
