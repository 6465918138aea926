"""Divides a cluster among several operators: whole namespaces, by a hash of their names."""

from __future__ import annotations

import re
from hashlib import sha256

from msgspec import Struct


class Shard(Struct, frozen=True):
    """One of ``count`` shards, counted from 0."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read ``1/3``: the second of three.

        Raises ``ValueError``.
        """
        match = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text)
        if match is None:
            raise ValueError(f"{text!r} is no shard: write INDEX/COUNT, such as 0/2 for the first of two")
        index, count = map(int, match.groups())
        if index >= count:
            raise ValueError(f"there is no shard {index} of {count}: they are counted from 0")
        return cls(index, count)

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def has(self, namespace: str) -> bool:
        """Return whether a namespace belongs to this shard. In every division each namespace belongs to one shard."""
        # Not ``hash``, which differs from process to process.
        return int.from_bytes(sha256(namespace.encode()).digest()[:8]) % self.count == self.index

    def lease(self, base: str) -> str:
        """Return the name of the Lease by which one replica leads this shard."""
        return base if self.count == 1 else f"{base}-{self.index}-of-{self.count}"

    def overlaps(self, base: str, lease: str) -> bool:
        """Return whether a Lease belongs to a shard of another division that shares namespaces with this shard."""
        match = re.fullmatch(rf"{re.escape(base)}(?:-\d+-of-(\d+))?", lease)
        return match is not None and int(match[1] or 1) != self.count
