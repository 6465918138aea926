"""Files that pages name exist: the answers to the ten questions in CONTRIBUTING.md, and all others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
OURS = "benchmarks|charts|cli|core|docs|examples|images|operator|sidecar|tests|tools"
ELSEWHERE = {"v1/core/sched/scheduler.py", "examples/batched-bench/README.md"}
"""Files of vLLM and llama.cpp."""
GONE = {"mixed.py", "test_X.py"}
"""Files of the past, which a decision names, and patterns."""


def test_every_answer_is_a_file():
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    section = text.partition("Ten questions")[2].partition("\n## ")[0]
    files = re.findall(r"`([a-z0-9_]+/[^`]+\.py)`", section)
    assert len(files) >= 10
    assert [name for name in files if not (ROOT / name).is_file()] == []


def named(text):
    """Yield the files that a page names: from the root, or as the end of a path in backticks."""
    yield from re.findall(rf"(?<![\w/.-])((?:{OURS})/[\w./-]+?\.(?:py|md|json|yaml|toml))\b", text)
    yield from re.findall(r"`([\w/]+\.py)`", text)


@pytest.fixture(scope="module")
def files():
    """All files of the repository, without what is built into other folders."""
    paths = [*ROOT.glob("*.*"), *(path for folder in OURS.split("|") for path in (ROOT / folder).rglob("*.*"))]
    return [f"/{path.relative_to(ROOT).as_posix()}" for path in paths]


def missing(names, files):
    return [name for name in sorted(names) if not any(path.endswith(f"/{name}") for path in files)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_files_that_a_page_names_exist(page, files):
    assert missing({*named(page.read_text("utf-8"))} - ELSEWHERE - GONE, files) == []


def test_a_file_that_is_gone_is_found(files):
    text = "see `tuning/guards.py` and docs/tuning.md, but neither `tuning/gone.py` nor docs/none.md"
    assert missing(named(text), files) == ["docs/none.md", "tuning/gone.py"]
