"""OpenAI's clients and others built on them, unchanged, before a sidecar with a gate: in environments of their own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

CACHE = Path.home() / ".cache" / "carpool"
HERE = Path(__file__).parent


def python(name):
    return Path(os.environ.get(f"CARPOOL_{name.upper()}", CACHE / name)) / "bin" / "python"


def run(command, gated, *more):
    ran = subprocess.run(  # noqa: S603 - our own
        [*command, f"http://{gated.data}", *more], capture_output=True, text=True, check=False, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_client_streams_is_refused_and_leaves(gated):
    run([python("openai"), HERE / "openai_client.py"], gated)


def test_the_client_uploads_a_file_and_has_it_answered(keeping_jobs):
    run([python("openai"), HERE / "openai_batches.py"], keeping_jobs)


def test_litellm_streams_is_refused_and_leaves(gated):
    run([python("litellm"), HERE / "litellm_client.py"], gated)


def test_langchain_streams_is_refused_and_leaves(gated):
    run([python("langchain"), HERE / "langchain_client.py"], gated)


def test_the_client_for_node_streams_is_refused_and_leaves(gated):
    run(["node", for_node(HERE / "openai_client.mjs")], gated)


@pytest.mark.parametrize("name", ["openai", "litellm", "langchain"])
def test_tools_logprobs_errors_and_cancellation(chatting, name):
    run([python(name), HERE / "tools" / f"{name}_client.py"], chatting, f"http://{chatting.upstream}")


def test_tools_logprobs_errors_and_cancellation_with_node(chatting):
    run(["node", for_node(HERE / "tools" / "openai_client.mjs")], chatting, f"http://{chatting.upstream}")


def for_node(source):
    """Copy a script to where its modules are: Node looks for them beside it."""
    script = Path(os.environ.get("CARPOOL_NODE", CACHE / "node")) / source.name
    script.write_bytes(source.read_bytes())
    return script
