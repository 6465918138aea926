"""A language model of random weights, as a GGUF file: a Llama that generates syllables. Nothing has to be downloaded.

``python -m carpool_cli.demo.random_model OUT [SIZE]``. It costs as much as a trained model of its size, and its output
is meaningless. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import numpy as np

from carpool_cli.options import OUTPUT_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray


class Size(NamedTuple):
    """Size of a model; its heads have 64 values each, half as many for keys and values."""

    width: int
    layers: int
    feed_forward: int
    context: int = 4096


SIZES = {"tiny": Size(128, 2, 256), "small": Size(384, 6, 1024), "medium": Size(768, 8, 2048)}
"""0.5 MB, 20 MB, 100 MB."""

CONSONANTS, VOWELS = "bdfgklmnprstvwz", "aeiou"
"""Letters of the syllables that are its tokens, with and without a leading blank."""

HEAD = 64
SHARP = 6.0
"""Standard deviation of the logits: so large that a token with logit 0 is hardly ever drawn."""

CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"

_ALIGNMENT = 32
_U32, _F32, _BOOL, _STRING, _ARRAY, _I32 = 4, 6, 7, 8, 9, 5
_FORMS = {_U32: "<I", _F32: "<f", _BOOL: "<?", _I32: "<i"}
_KIND_F32, _KIND_F16 = 0, 1
_NORMAL, _CONTROL = 1, 3


def write(path: Path, size: Size, *, seed: int = 0, every_byte: bool = False, ends: bool = False) -> None:
    """Write the file.

    ``every_byte``: it generates single bytes, too, so that its text has broken characters. ``ends``: it may end an
    answer; otherwise answers have the requested length.
    """
    rng = np.random.default_rng(seed)
    tokens, merges = vocabulary()
    facts: list[tuple[str, int, Any]] = [
        ("general.architecture", _STRING, "llama"),
        ("general.name", _STRING, "random"),
        ("general.file_type", _U32, 1),
        ("llama.context_length", _U32, size.context),
        ("llama.embedding_length", _U32, size.width),
        ("llama.block_count", _U32, size.layers),
        ("llama.feed_forward_length", _U32, size.feed_forward),
        ("llama.attention.head_count", _U32, size.width // HEAD),
        ("llama.attention.head_count_kv", _U32, max(1, size.width // HEAD // 2)),
        ("llama.attention.layer_norm_rms_epsilon", _F32, 1e-5),
        ("llama.rope.dimension_count", _U32, HEAD),
        ("llama.rope.freq_base", _F32, 10_000.0),
        ("llama.vocab_size", _U32, len(tokens)),
        ("tokenizer.ggml.model", _STRING, "gpt2"),
        ("tokenizer.ggml.pre", _STRING, "gpt-2"),
        ("tokenizer.ggml.tokens", _ARRAY, (_STRING, tokens)),
        ("tokenizer.ggml.token_type", _ARRAY, (_I32, [_NORMAL] * (len(tokens) - 2) + [_CONTROL] * 2)),
        ("tokenizer.ggml.merges", _ARRAY, (_STRING, merges)),
        ("tokenizer.ggml.bos_token_id", _U32, len(tokens) - 2),
        ("tokenizer.ggml.eos_token_id", _U32, len(tokens) - 1),
        ("tokenizer.ggml.add_bos_token", _BOOL, False),
        ("tokenizer.chat_template", _STRING, CHAT),
    ]
    tensors = list(_tensors(size, len(tokens), rng, every_byte=every_byte, ends=ends))
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(facts))
    head += b"".join(_string(name) + struct.pack("<I", kind) + _value(kind, value) for name, kind, value in facts)
    at, bodies = 0, []
    for name, array in tensors:
        kind = _KIND_F16 if array.dtype == np.float16 else _KIND_F32
        shape = array.shape[::-1]  # the fastest first
        head += _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, at)
        body = array.tobytes()
        bodies.append(body + b"\0" * (-len(body) % _ALIGNMENT))
        at += len(bodies[-1])
    head += b"\0" * (-len(head) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(head)
        file.writelines(bodies)


def vocabulary() -> tuple[list[str], list[str]]:
    """Return tokens and merges of a byte-level BPE: all bytes, then syllables, without and with a blank before."""
    # GPT-2's characters for bytes: printable ones are themselves, the others follow 255.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    characters = {byte: chr(byte) for byte in plain} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    tokens, merges = [characters[byte] for byte in range(256)], []
    syllables = [(first, second) for first in CONSONANTS for second in VOWELS]
    for first, second in syllables:
        merges.append(f"{first} {second}")
        tokens.append(first + second)
    for first, second in syllables:
        merges.append(f"{characters[32]} {first}{second}")
        tokens.append(characters[32] + first + second)
    return [*tokens, "<s>", "</s>"], merges


def _tensors(
    size: Size, tokens: int, rng: np.random.Generator, *, every_byte: bool, ends: bool
) -> Iterator[tuple[str, NDArray[Any]]]:
    width = size.width
    keys = max(1, width // HEAD // 2) * HEAD

    def drawn(*shape: int) -> NDArray[np.float16]:
        values: NDArray[np.float16] = (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float16)
        return values

    ones = np.ones(width, np.float32)
    yield "token_embd.weight", drawn(tokens, width)
    for layer in range(size.layers):
        prefix = f"blk.{layer}."
        yield prefix + "attn_norm.weight", ones
        yield prefix + "ffn_norm.weight", ones
        yield prefix + "attn_q.weight", drawn(width, width)
        yield prefix + "attn_k.weight", drawn(keys, width)
        yield prefix + "attn_v.weight", drawn(keys, width)
        yield prefix + "attn_output.weight", drawn(width, width)
        yield prefix + "ffn_gate.weight", drawn(size.feed_forward, width)
        yield prefix + "ffn_up.weight", drawn(size.feed_forward, width)
        yield prefix + "ffn_down.weight", drawn(width, size.feed_forward)
    yield "output_norm.weight", ones
    output = drawn(tokens, width) * np.float16(SHARP)
    # Rows of zeros always have logit 0, and others far more.
    if not every_byte:
        output[:256] = 0
    output[-2] = 0
    if not ends:
        output[-1] = 0
    yield "output.weight", output


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(kind: int, value: Any) -> bytes:  # noqa: ANN401 - by its kind
    if kind == _STRING:
        return _string(value)
    if kind == _ARRAY:
        inner, values = value
        return struct.pack("<IQ", inner, len(values)) + b"".join(_value(inner, each) for each in values)
    return struct.pack(_FORMS[kind], value)


@click.command()
@click.argument("out", metavar="OUT", type=OUTPUT_FILE)
@click.argument("size", type=click.Choice(list(SIZES)), default="tiny")
def command(out: Path, size: str) -> None:
    """Write a Llama of random weights to the GGUF file OUT: 0.5 MB (tiny), 20 MB (small) or 100 MB (medium)."""
    write(out, SIZES[size])


if __name__ == "__main__":
    command()
