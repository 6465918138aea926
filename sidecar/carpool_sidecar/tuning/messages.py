"""Messages between the sidecar and its tuner process: length-prefixed MessagePack.

Not JSON: forecasts of an overload are infinite, which JSON can't express.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from carpool.exchange.decision import Decision, Observation
from carpool.forecasting.capacity import Capacity
from carpool.policy.durations import Duration, Quantity
from carpool.policy.parameters import Parameters
from carpool_sidecar.frames import framed

if TYPE_CHECKING:
    from collections.abc import Callable


class Setup(msgspec.Struct, tag=True, frozen=True):
    """The policy to tune by, as plain data. Everything learned before is forgotten."""

    policy: dict[str, Any]
    steered: bool = False
    """Whether an operator tunes the parameters that are fixed here."""


class Observed(msgspec.Struct, frozen=True):
    """One model's observation, and its parameters at the time.

    ``generation``: of the model and the policy together. What was learned under another one is forgotten.
    """

    observation: Observation
    parameters: Parameters
    generation: int


class Observations(msgspec.Struct, tag=True, frozen=True):
    """Every model's observation of one interval."""

    models: dict[str, Observed]


Message: TypeAlias = Setup | Observations


class Decided(msgspec.Struct, tag=True, frozen=True):
    """The decision for one of them, in that ``generation``."""

    model: str
    decision: Decision
    generation: int
    measure: tuple[int, ...] = ()
    """Rows of batches of copies that would show the capacity, those that show most first."""


class Answered(msgspec.Struct, tag=True, frozen=True):
    """Every model of the observations has had its decision."""


class Measured(msgspec.Struct, tag=True, frozen=True):
    """The capacity of one replica for a model, in that ``generation``."""

    model: str
    capacity: Capacity
    generation: int


Reply: TypeAlias = Decided | Answered | Measured


def _encode(value: object) -> object:
    return float(value) if isinstance(value, Duration) else int(value)  # type: ignore[call-overload] # a Quantity


def _decode(kind: type, value: Any) -> object:  # noqa: ANN401 - a number
    return Duration(value) if kind is Duration else Quantity(value)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode)


def frame(message: Message | Reply) -> bytes:
    """Return a message with its length before it."""
    return framed(_encoder.encode(message))


read_message: Callable[[bytes], Message] = msgspec.msgpack.Decoder(Setup | Observations, dec_hook=_decode).decode
"""Decodes a message to the tuner, without its length."""

read_reply: Callable[[bytes], Reply] = msgspec.msgpack.Decoder(Decided | Answered | Measured, dec_hook=_decode).decode
"""Decodes a reply of the tuner, without its length."""
