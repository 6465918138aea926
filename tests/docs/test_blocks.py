"""What the documentation says to type works, and what it says to write is accepted."""

from __future__ import annotations

import pytest
import yaml
from pages import ROOT, WRITTEN, Shell, blocks, runnable

import reference
from carpool.policy.spec import BatchingPolicy
from carpool_operator.api.spec import KIND, read_policy
from carpool_sidecar.config.settings import SidecarConfig, parse

LANGUAGES = {"bash", "python", "yaml", "json", "text", "promql", "http"}

CONFIG = set(SidecarConfig.__struct_encode_fields__)
POLICY = set(BatchingPolicy.__struct_encode_fields__)


def name(page):
    return str(page.relative_to(ROOT))


@pytest.mark.real
@pytest.mark.parametrize("page", [page for page in WRITTEN if runnable(page)], ids=name)
def test_a_page_can_be_followed(page, tmp_path):
    with Shell(tmp_path) as shell:
        for block in runnable(page):
            shell.run(block)


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_every_block_says_what_it_is(page):
    for block in blocks(page):
        assert block.language in LANGUAGES, block.where
        note = block.note.partition(":")[0]
        assert note in {"", "not run", "server", "file", "its output", "chart values"}, f"{block.where}: {block.note}"
        assert block.says("not run") != "", f"{block.where}: say why"


CONFIGURATIONS = [
    block
    for page in WRITTEN
    for block in blocks(page)
    if block.language == "yaml" and block.says("chart values") is None  # tests/charts has helm judge those
]


@pytest.mark.parametrize("block", CONFIGURATIONS, ids=lambda block: block.where)
def test_configurations_are_accepted(block):
    for document in yaml.safe_load_all(block.text):
        if document.get("kind") == KIND:
            read_policy(document)
        if document.keys() & {"apiVersion", "groups", "scrape_configs"}:
            continue  # Kubernetes' and Prometheus' own
        plain = {"policy": document} if document.keys() <= POLICY else document
        assert plain.keys() <= CONFIG, f"{block.where}: {sorted(plain.keys() - CONFIG)}"
        # A part is shown without what every file needs.
        whole = {} if plain.keys() & {"onnx", "llm"} else {"upstream": {"url": "http://127.0.0.1:9000"}}
        whole |= plain
        whole["policy"] = {"slo": {"latency": {"p99": "50ms"}}} | plain.get("policy", {})
        parse(yaml.safe_dump(whole))


@pytest.mark.parametrize("page", reference.SHOWN)
def test_the_output_shown_is_what_the_command_prints(page):
    text = (ROOT / page).read_text("utf-8")
    assert reference.shown(text) == text, "run: make docs"


def test_every_output_that_is_shown_is_compared():
    shown = {block.page for page in WRITTEN for block in blocks(page) if block.note == "its output"}
    assert {page.relative_to(ROOT).as_posix() for page in shown} == {*reference.SHOWN}
