"""What a control plane sends to a sidecar, signed: a change of its parameters and policy, or leave to read.

Both are sent as JSON with an Ed25519 signature over the very bytes. One key signs both; neither passes for the other,
for each refuses the other's fields.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from carpool.policy.parameters import Parameters
from carpool.policy.plain import Camel, PolicyError, from_plain, to_plain
from carpool.policy.spec import BatchingPolicy

MAX_KEYS = 8
"""Public keys that are accepted at a time: one, and two or three while one replaces another."""


class Change(Camel, frozen=True, kw_only=True):
    """What replaces a target's parameters, and its policy; it stays in force after ``expires``.

    ``target``: the workload, ``namespace/Kind/name``. ``generation``: newer ones are larger; whole milliseconds since
    the epoch, where a control plane keeps no count. ``expires``: seconds since the epoch, after which it is
    refused. ``policy``: ``None`` stands for the one that the sidecar was started with. ``parameters``: by model name,
    ``*`` for the rest. ``keys``: the public keys that are accepted from now on; none: those that are accepted now.
    """

    target: str
    generation: Annotated[int, Meta(ge=1)]
    expires: float
    policy: BatchingPolicy | None = None
    parameters: dict[str, Parameters]
    keys: Annotated[tuple[Annotated[str, Meta(pattern="^[0-9a-f]{64}$")], ...], Meta(max_length=MAX_KEYS)] = ()

    def validate(self) -> Change:
        """Check what types can't say, and return the change.

        Raises ``PolicyError`` that names the field.
        """
        if self.policy is not None:
            try:
                self.policy.validate()
            except PolicyError as error:
                raise PolicyError(f"policy.{error.field}", str(error).partition(": ")[2]) from None
        if not self.parameters:
            raise PolicyError("parameters", "name those of a model, or `*` for every model")
        return self


class Ticket(Camel, frozen=True, kw_only=True):
    """Leave to read what a target's sidecars say of themselves, until ``expires`` (seconds since the epoch)."""

    target: str
    expires: float


def encode(document: Change | Ticket) -> bytes:
    """Write the bytes that are signed and sent; equal documents give equal bytes."""
    return msgspec.json.encode(to_plain(document))


def read_change(plain: Any) -> Change:  # noqa: ANN401 - parsed JSON, whatever it holds
    """Build a valid change from parsed JSON.

    Raises ``PolicyError`` naming the field and what it takes.
    """
    return from_plain(plain, Change, what="change").validate()
