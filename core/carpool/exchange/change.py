"""Signed documents from a control plane to a sidecar: a change of parameters and policy, or a ticket for reading.

Both are sent as JSON with an Ed25519 signature over exactly these bytes. One key signs both. Neither is accepted in
place of the other, because each refuses the other's fields.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from carpool.policy.parameters import Parameters
from carpool.policy.plain import Camel, PolicyError, from_plain, to_plain
from carpool.policy.spec import BatchingPolicy

MAX_KEYS = 8
"""Most public keys accepted at a time: usually one, and two or three while keys are replaced."""


class Change(Camel, frozen=True, kw_only=True):
    """New parameters, and a policy, for a target; they stay in force after ``expires``.

    ``target``: the workload, ``namespace/Kind/name``. ``generation``: newer ones are larger; whole milliseconds since
    the epoch, where a control plane keeps no count. ``expires``: seconds since the epoch, after which it is
    refused. ``policy``: ``None`` stands for the one that the sidecar was started with. ``parameters``: by model name,
    ``*`` for the rest. ``keys``: the public keys that are accepted from now on; empty: the present ones.
    """

    target: str
    generation: Annotated[int, Meta(ge=1)]
    expires: float
    policy: BatchingPolicy | None = None
    parameters: dict[str, Parameters]
    keys: Annotated[tuple[Annotated[str, Meta(pattern="^[0-9a-f]{64}$")], ...], Meta(max_length=MAX_KEYS)] = ()

    def validate(self) -> Change:
        """Check what types can't express, and return the change; raises ``PolicyError`` that names the field."""
        if self.policy is not None:
            try:
                self.policy.validate()
            except PolicyError as error:
                raise PolicyError(f"policy.{error.field}", str(error).partition(": ")[2]) from None
        if not self.parameters:
            raise PolicyError("parameters", "name those of a model, or `*` for every model")
        return self


class Ticket(Camel, frozen=True, kw_only=True):
    """Permission to read the reports of a target's sidecars, until ``expires`` (seconds since the epoch)."""

    target: str
    expires: float


def encode(document: Change | Ticket) -> bytes:
    """Write the bytes that are signed and sent; equal documents give equal bytes."""
    return msgspec.json.encode(to_plain(document))


def read_change(plain: Any) -> Change:  # noqa: ANN401 - parsed JSON, whatever it holds
    """Build a valid change from parsed JSON; raises ``PolicyError`` naming the field and what it takes."""
    return from_plain(plain, Change, what="change").validate()
