from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.policy.plain import PolicyError
from carpool_cli.demo.random_model import SIZES, write
from carpool_sidecar.llm.model_file import CONTEXT, describe


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write(path, SIZES["tiny"])
    return path


def test_context_and_cache_are_read(whole):
    # two layers, one head of 64 for keys and values, two bytes each
    assert describe(whole) == (4096, 2 * 2 * 2 * 1 * 64)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(PolicyError, match=r"llm\.path: there is no file"):
        describe(tmp_path / "none.gguf")


def test_a_download_that_broke_off(whole, tmp_path):
    path = tmp_path / "half.gguf"
    path.write_bytes(whole.read_bytes()[:-200])
    with pytest.raises(PolicyError, match=r"it has \d+ bytes of \d+\): download it again"):
        describe(path)


@pytest.mark.parametrize(
    "content", [b"", b"GG", b"PK\x03\x04" * 9, b"GGUF", b"GGUF" + b"\xff" * 40, b"GGUF\x01" + b"\0" * 60]
)
def test_what_is_no_gguf_is_refused(tmp_path, content):
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(PolicyError, match="is no GGUF file that can be read"):
        describe(path)


def test_a_file_without_tensors_is_refused(tmp_path):
    path = tmp_path / "empty.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 0) + bytes(64))
    with pytest.raises(PolicyError, match="it has no tensors"):
        describe(path)


@given(st.data())
def test_a_damaged_file_is_read_or_refused(whole, data):
    content = bytearray(whole.read_bytes()[:20_000])
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 400))] = data.draw(st.integers(0, 255))
    path = whole.parent / "damaged.gguf"
    path.write_bytes(content[: data.draw(st.integers(1, len(content)))])
    try:
        describe(path)
    except PolicyError as error:
        assert error.field == "llm.path"  # noqa: PT017 - either is right


def test_a_folder_of_openvino(tmp_path):
    with pytest.raises(PolicyError, match=r"has no openvino_model\.xml"):
        describe(tmp_path)
    (tmp_path / "openvino_model.xml").touch()
    assert describe(tmp_path) == (CONTEXT, 0)
    said = {"max_position_embeddings": 8192, "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512}
    (tmp_path / "config.json").write_text(json.dumps({**said, "num_key_value_heads": 2}))
    assert describe(tmp_path) == (8192, 2 * 2 * 2 * 2 * 64)


@pytest.mark.parametrize(
    ("said", "context"),
    [
        ("[]", CONTEXT),
        ('"x"', CONTEXT),
        ("[" * 10_000, CONTEXT),
        ('{"num_attention_heads": "8", "hidden_size": 64, "max_position_embeddings": 100}', 100),
        ('{"num_attention_heads": 8, "hidden_size": "64", "max_position_embeddings": 1e9}', CONTEXT),
        ('{"num_attention_heads": [8], "num_hidden_layers": null}', CONTEXT),
    ],
)
def test_a_folder_whose_config_says_other_things_is_one_that_says_nothing(tmp_path, said, context):
    (tmp_path / "openvino_model.xml").touch()
    (tmp_path / "config.json").write_text(said)
    assert describe(tmp_path) == (context, 0)
