"""Refuse the private words of earlier versions in what people read: ``python tools/words.py``.

Reads the pages that people write (outside code) and the messages of ``cli``, ``sidecar`` and ``operator``: string
literals with a space, and the docstrings that click shows as help. In the folders of ``NOTES`` it also reads all other
docstrings and the comments, in the files of ``OTHERS`` the comments, and in the folders of ``TESTS`` the names of test
functions. Prints ``file:line: word: what to write`` and exits 1 if it finds one that ``ALLOWED`` does not explain, or
an entry of ``ALLOWED`` that nothing needs any more.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/*.md",
    "docs/decisions/*.md",
    "examples/*.md",
    "CHANGELOG.md",
    "charts/**/NOTES.txt",
)
GENERATED = {"docs/proof.md", "docs/proof-figures.md"}
MESSAGES = ("cli", "sidecar", "operator")
"""Folders whose messages are read."""
NOTES = ("benchmarks", "charts", "cli", "core", "images", "operator", "sidecar", "tests", "tools")
"""Folders whose docstrings and comments are read."""
TESTS = ("tests",)
"""Folders whose names of test functions are read."""
OTHERS = ("Makefile", "charts/**/*.yaml", "examples/**/*.yaml")
"""Files whose comments are read: lines that begin with `#`."""

_TARGET = r"(?:SLO|p(?:50|9\d+)|promise)"
_KEPT = r"(?:holds?|held|keep|keeps|kept|breaks?|broke|broken)"

WORDS = {
    r"t\(b\)": "batch latency",
    r"\bexecutors?\b": "server concurrency",
    r"\bdevice(?: time)? a request": "device time per request",
    r"\b(?:rides?|rode|riding|riders?)\b": "batched, batched together, requests of the batch",
    r"\bcompany\b": "other requests in the batch",
    r"\b(?:aboard|boarding)\b": "in the batch",
    r"\b(?:told|tells?|telling)\b": "reported, forecast, measured, shows",
    r"\b(?:dares?|daring|bolder|brighter|hop(?:es?|ed|ing)|luck|luckiest)\b": "candidate, optimistic estimate, chance",
    r"\b(?:a|the|such a|vain|tuner's) (?:try|probe)\b(?! again)|\bprob(?:e|ed) sizes?\b": "exploration batch",
    r"\b(?:spells?|crowds?|bunch(?:es|ed)?)\b": "bursts",
    r"\b(?:settling|lots)\b": "refining the forecast, samples",
    r"\bnews\b": "change detection, changed",
    r"\bcaution\b": "safety margin, error budget",
    r"\b(?:valleys?|(?<!control )(?<!data )planes?|stairs?)\b|\bwithin reach\b": "local minimum, map, load ramp, range",
    rf"\b{_KEPT} (?:(?:the|its|your|a|an|every|any|that|this) )?(?:\w+ )?{_TARGET}\b": "meets, misses the SLO",
    rf"\b{_TARGET} (?:(?:that|which|it|is|are|was|be|must|not|can) ){{0,3}}{_KEPT}\b": "the SLO is met, missed",
    r"\b(?:whoever|whom)\b|\brequests? who\b|(?:^|[.;|] )Who (?![^.|]*\?)": "anyone who, requests that",
    r"\b(?:so far as|of which|thereof|that which)\b": "(rewrite the sentence)",
}
"""What is refused, and what to write instead."""

ALLOWED = {
    ("README.md", "ride"): "the line under the name: a car pool is about rides",
    ("docs/tuning-details.md", "t(b)"): "the formula, where it is introduced",
    ("docs/tuning.md", "t(b)"): "the formula, where it is introduced",
    ("core/carpool/learning/latency_model.py", "t(b)"): "the formula, where it is introduced",
    ("cli/carpool_cli/profiling/device_profile.py", "executors"): "a field of profile files",
}
"""A file, what is found there, and why it may stay."""


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Lines of a page with their numbers, without code, comments and the targets of links."""
    fenced = False
    for number, line in enumerate(text.split("\n"), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, re.sub(r"`[^`]*`|<!--.*?-->|(?<=\])\([^)]*\)", "`", line)


def messages(source: str) -> Iterator[tuple[int, str]]:
    """List string literals that have a space, with line numbers; of docstrings those that click shows."""
    tree = ast.parse(source)
    silent = {id(each) for each in _silent(tree)}
    for node in _texts(ast.walk(tree)):
        if id(node) not in silent:
            yield from ((number, line) for number, line in _lines(node) if " " in line)


def notes(source: str) -> Iterator[tuple[int, str]]:
    """Lines of comments, and of docstrings that click does not show, with their numbers and without code."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], _without_code(token.string)
    for node in _texts(_silent(ast.parse(source))):
        yield from ((number, _without_code(line)) for number, line in _lines(node))


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Lines that are comments, with their numbers and without code."""
    for number, line in enumerate(source.split("\n"), 1):
        if line.lstrip().startswith("#"):
            yield number, _without_code(line)


def names(source: str) -> Iterator[tuple[int, str]]:
    """Names of test functions with the numbers of their lines, underscores as spaces."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node.lineno, node.name.replace("_", " ")


def _silent(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield the expressions that are statements, docstrings among them, without those that click shows."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        decorators = [ast.unparse(each) for each in getattr(node, "decorator_list", [])]
        shown = any(re.search(r"\.(?:command|group)\(", each) for each in decorators)
        if isinstance(body, list) and not shown:
            yield from (each.value for each in body if isinstance(each, ast.Expr))


def _texts(nodes: Iterable[ast.AST]) -> Iterator[ast.Constant]:
    return (each for each in nodes if isinstance(each, ast.Constant) and isinstance(each.value, str))


def _lines(node: ast.Constant) -> Iterator[tuple[int, str]]:
    return enumerate(str(node.value).split("\n"), node.lineno)


def _without_code(line: str) -> str:
    return re.sub(r"``.*?``|`[^`]*`", "`", line)


def findings(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str, str]]:
    """Line number, the word, and what to write."""
    for number, line in lines:
        for pattern, instead in WORDS.items():
            for found in re.finditer(pattern, line, re.IGNORECASE):
                yield number, found[0].strip(" .;:|"), instead


def wrong(root: Path, allowed: Iterable[tuple[str, str]] = ALLOWED) -> list[str]:
    """Say what is wrong, a line each."""
    unused, lines = set(allowed), []
    parts = []
    for read, patterns in ((prose, PAGES), (comments, OTHERS)):
        parts += [(path, read) for path in sorted({path for pattern in patterns for path in root.glob(pattern)})]
    for read, folders in ((messages, MESSAGES), (notes, NOTES), (names, TESTS)):
        parts += [(path, read) for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    for path, read in parts:
        name = str(path.relative_to(root))
        for number, word, instead in findings(read(path.read_text("utf-8"))):
            if (name, word) in {*allowed}:
                unused.discard((name, word))
            elif name not in GENERATED:
                lines.append(f"{name}:{number}: {word!r}: write: {instead}")
    return lines + [f"{name}: nobody writes {word!r} there: take it out of ALLOWED" for name, word in sorted(unused)]


def main() -> int:
    """Check the repository."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    lines = wrong(ROOT)
    for line in lines:
        print(line)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
