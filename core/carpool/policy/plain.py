"""Policy types from plain data (parsed YAML or JSON) and back; errors name the field and what it takes."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from carpool.policy.durations import Duration, Quantity
from carpool.policy.schema import alternatives


class PolicyError(ValueError):
    """A policy that contradicts itself; ``field`` is the dotted path of what to change."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.field = path


class Camel(Struct, rename="camel", frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Base of everything that is written in a file: camelCase outside, unknown fields refused by name."""


class Frozen(Struct, frozen=True):
    """Base of structs in compiled modules: mypyc drops the keywords of a class statement, so structs inherit them.

    Each repeats them for the type checker. mypyc also drops what stands in brackets in an annotation (it keeps
    ``dict`` of ``dict[str, int]``), except in quotes: fields that msgspec reads from JSON have such annotations quoted.
    """


class FrozenCamel(Frozen, rename="camel", frozen=True):
    """`Frozen` with camelCase names in JSON."""


class MutableCamel(Struct, rename="camel"):
    """`FrozenCamel` for structs that change."""


T = TypeVar("T")


def from_plain(value: object, kind: type[T], *, what: str) -> T:
    """Build a policy type from parsed YAML or JSON; raises ``PolicyError`` naming the field and what it takes."""
    try:
        return msgspec.convert(value, kind, dec_hook=_decode, strict=True)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        path = path.rstrip("`").lstrip(".")
        if message.startswith(("Invalid enum value", "Object contains unknown field")):
            message = f"{message}; there are {', '.join(alternatives(kind, path))}"
        raise PolicyError(path or what, message) from None


def to_plain(value: Struct) -> dict[str, Any]:
    """Return the plain data from which ``from_plain`` builds an equal value."""
    plain: dict[str, Any] = msgspec.to_builtins(value, enc_hook=str, builtin_types=())
    return plain


def _decode(kind: type, value: object) -> object:
    if kind is Duration:
        if value == 0 and not isinstance(value, bool | float):
            return Duration(0.0)  # `min: 0` needs no unit
        if isinstance(value, str):
            return Duration.parse(value)
        raise ValueError(f"{value!r} is not a duration: write it with its unit, e.g. 50ms")
    if kind is Quantity:
        return Quantity.parse(str(value))
    raise NotImplementedError(kind)
