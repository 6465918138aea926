"""Metadata of a model file, read before it is loaded: its context, and the size of a token in the KV cache.

GGUF's header (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), or an OpenVINO folder's ``config.json``.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from carpool.policy.plain import PolicyError

if TYPE_CHECKING:
    from pathlib import Path

FIELD = "llm.path"
"""The field that names the file."""

CONTEXT = 4096
"""Tokens of prompt and answer, if the model doesn't state its limit."""

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_SIZES = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36), 10: (256, 84),
    11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 30: (1, 2),
}  # fmt: skip
"""Values of a block and its bytes, by the kind of a tensor; of others, only the beginning is looked for."""

_MOST_VALUES = 1 << 24
"""Values of an array at most: a vocabulary has 2^18."""


class Described(NamedTuple):
    """A model's metadata. ``kv_token_bytes``: of one token in the KV cache at 16 bits; 0 if unknown."""

    context: int
    kv_token_bytes: int


def describe(path: Path) -> Described:
    """Read a model's metadata.

    Raises ``PolicyError`` if the model can't be served.
    """
    if path.is_dir():
        return _folder(path)
    if not path.is_file():
        raise PolicyError(FIELD, f"there is no file {path}")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = _Header(data)
            facts = header.facts()
            header.check(_count(facts.get("general.alignment", 32)))
    except (ValueError, struct.error, UnicodeDecodeError) as error:
        raise PolicyError(FIELD, f"{path} is no GGUF file that can be read ({error}): download it again") from None
    except OSError as error:
        raise PolicyError(FIELD, f"{path}: {error.strerror}") from None
    kind = facts.get("general.architecture", "")
    named = {name.removeprefix(f"{kind}."): value for name, value in facts.items()}
    heads = _count(named.get("attention.head_count"))
    width = named.get("attention.key_length") or (_count(named.get("embedding_length")) // heads if heads else 0)
    kv_heads = named.get("attention.head_count_kv", heads)
    return _described(named.get("context_length"), named.get("block_count", 0), kv_heads, width)


def _folder(path: Path) -> Described:
    if not (path / "openvino_model.xml").is_file():
        raise PolicyError(
            FIELD, f"{path} has no openvino_model.xml: name a .gguf file, or a folder of an OpenVINO model"
        )
    try:
        said = json.loads((path / "config.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        said = {}
    said = said if isinstance(said, dict) else {}
    heads = _count(said.get("num_attention_heads"))
    width = said.get("head_dim") or (_count(said.get("hidden_size")) // heads if heads else 0)
    kv_heads = said.get("num_key_value_heads", heads)
    return _described(said.get("max_position_embeddings"), said.get("num_hidden_layers", 0), kv_heads, width)


def _described(context: object, layers: object, heads: object, width: object) -> Described:
    # Keys and values of every layer, two bytes each.
    return Described(_count(context) or CONTEXT, 2 * 2 * _count(layers) * _count(heads) * _count(width))


def _count(value: object) -> int:
    """Return a positive integer; 0 for whatever else a file may say."""
    return value if isinstance(value, int) and value > 0 else 0


class _Header:
    """Reads the metadata of a GGUF file. Methods raise ``ValueError`` or ``struct.error`` where it is none."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 4
        if data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self._scalar("<I")
        if version not in {2, 3}:
            raise ValueError(f"version {version}; 2 and 3 are known")
        self._tensors = self._scalar("<Q")
        self._count = self._scalar("<Q")

    def facts(self) -> dict[str, Any]:
        """Return the metadata that are single values, by name."""
        if self._count > _MOST_VALUES:
            raise ValueError(f"{self._count} facts")
        found = {}
        for _ in range(self._count):
            name = self._string()
            value = self._value(self._scalar("<I"))
            if value is not None:
                found[name] = value
        return found

    def check(self, alignment: int) -> None:
        """Look whether all tensors are there: the runtime computes with what a download left out."""
        if not 0 < alignment <= 1 << 20 or self._tensors > _MOST_VALUES:
            raise ValueError(f"{self._tensors} tensors, aligned at {alignment}")
        if not self._tensors:
            raise ValueError("it has no tensors")
        end = 0
        for _ in range(self._tensors):
            self._string()
            values = math.prod(self._scalar("<Q") for _ in range(min(self._scalar("<I"), 8)))
            per_block, size = _SIZES.get(self._scalar("<I"), (1, 0))
            end = max(end, self._scalar("<Q") + values // per_block * size)
        begin = -(-self._at // alignment) * alignment
        if begin + end > len(self._data):
            raise ValueError(f"it has {len(self._data)} bytes of {begin + end}")

    def _value(self, kind: int) -> Any:  # noqa: ANN401 - whatever the file holds
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(self._form(kind))
        inner, count = self._scalar("<I"), self._scalar("<Q")
        if count > _MOST_VALUES:
            raise ValueError(f"an array of {count} values")
        if inner == _STRING:
            for _ in range(count):
                self._skip(self._scalar("<Q"))
        else:
            self._skip(count * struct.calcsize(self._form(inner)))
        return None

    @staticmethod
    def _form(kind: int) -> str:
        if kind not in _SCALARS:
            raise ValueError(f"a value of kind {kind}")
        return _SCALARS[kind]

    def _scalar(self, form: str) -> Any:  # noqa: ANN401 - a number or a truth value
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return value

    def _string(self) -> str:
        size, start = self._scalar("<Q"), self._at
        self._skip(size)
        return self._data[start : self._at].decode("utf-8")

    def _skip(self, size: int) -> None:
        self._at += size
        if self._at > len(self._data):
            raise ValueError("it ends too early")
