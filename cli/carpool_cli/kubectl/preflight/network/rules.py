"""What all kinds of policies have in common: rules that admit ports, or refuse them, to somebody."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from carpool_cli.kubectl.preflight.scene import Json, Peer

INGRESS, EGRESS = "ingress", "egress"

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

    def after(self, other: Rule) -> bool:
        """Whether what ``other`` is for is surely decided before this."""

    def for_all_pods_of(self, other: Rule) -> bool:
        """Whether its policy surely selects all pods that the policy of ``other`` does."""

    def patched(self, port: int, like: int, named: dict[str, int]) -> str:
        """Return the command by which it treats one more port as one that it covers, or leaves out."""


class Policies(NamedTuple):
    """What policies say of a pod. ``closing``: titles of those by which it admits only what is named.

    ``perhaps``: of those that would be such, and may be for other pods.
    """

    closing: list[str]
    rules: list[Rule]
    perhaps: Sequence[str] = ()


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
