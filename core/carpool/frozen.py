"""The base of structs that never change."""

from __future__ import annotations

from msgspec import Struct


class Frozen(Struct, frozen=True):
    """A struct that is frozen, and so can be hashed.

    This file is never compiled: mypyc drops the keywords of a class statement. A struct of a compiled module inherits
    them here, and repeats them for the type checker.
    """
