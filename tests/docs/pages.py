"""The documentation as the tests read it: pages, their blocks, and a place to run them.

A fenced block is run as it stands unless a comment in the line before it says otherwise:

- ``<!-- not run: WHY -->``: too long, or not possible here.
- ``<!-- server: URL ... -->``: one command that goes on until the page ends, or another one takes its ports. The next
  block runs once each URL has answered 200.
- ``<!-- its output -->``: some lines of what the block before prints; ``make docs`` brings them up to date.
- ``<!-- file: NAME -->``: is written to that file, for the blocks that follow.
- ``<!-- chart values: NAME -->``: values for the Helm chart.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]

WRITTEN = [
    path
    for pattern in ("*.md", "docs/*.md", "docs/decisions/*.md", "examples/*.md")
    for path in sorted(ROOT.glob(pattern))
]
"""Pages that people wrote; those in docs/reference are generated, and compared by ``make check``."""

PATIENCE = 120.0

_BLOCK = re.compile(r"^(?:<!-- ([^\n]*) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ADDRESS = re.compile(r"(?<=127\.0\.0\.1:)\d{4,5}\b|(?<=port )\d{4,5}\b")
_DEFAULTS = {
    r"\bcarpool standin\b": " --port 9000",
    r"\bcarpool up\b": " --port 8080 --admin-port 9090",
    r"\bcarpool (?:explain|top)\b(?!.* http)": " http://127.0.0.1:9090",
}
"""Addresses that nobody has to write, by the command that has them."""
_LASTS = re.compile(r"(--(?:for|warm-up|over)) \d+m?s\b")


class Block(NamedTuple):
    """A fenced block: ``note`` is the comment before it, ``line`` where it begins."""

    page: Path
    line: int
    note: str
    language: str
    text: str

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def says(self, word: str) -> str | None:
        """What follows ``word:`` in the note."""
        name, colon, rest = self.note.partition(":")
        return rest.strip() if colon and name == word else None


def blocks(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    return [
        Block(page, text.count("\n", 0, found.start(2)) + 1, found[1] or "", found[2], found[3])
        for found in _BLOCK.finditer(text)
    ]


def runnable(page: Path) -> list[Block]:
    return [
        block
        for block in blocks(page)
        if block.says("file") or (block.language in {"bash", "python"} and block.says("not run") is None)
    ]


class Shell:
    """A folder that looks like the repository's root, where blocks run one after the other.

    The ports in them are exchanged for free ones, and stretches of time for short ones.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports: dict[str, str] = {}
        first = 20_000 + os.getpid() * 97 % 10_000  # pages that are followed at the same time keep apart
        self._candidates = iter(range(first, 32_000))
        self._servers: list[tuple[set[str], subprocess.Popen[bytes], Path]] = []
        for name in ("benchmarks", "examples", "docs", "tests"):
            (folder / name).symlink_to(ROOT / name)
        (folder / ".venv").mkdir()
        (folder / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._environment = os.environ | {"PATH": path, "COLUMNS": "140"}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for _, process, _ in self._servers:
            self._end(process)

    def run(self, block: Block) -> None:
        text = self._here(block.text)
        if (name := block.says("file")) is not None:
            (self._folder / name).write_text(text)
        elif (urls := block.says("server")) is not None:
            self._serve(block, text, self._here(urls).split())
        else:
            done = subprocess.run(  # noqa: S603 - the documentation's own commands are what is tested
                self._command(block.language, text), cwd=self._folder, env=self._environment,
                stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE, check=False,
            )  # fmt: skip
            assert done.returncode == 0, f"{block.where}\n{text}\n{done.stdout}{done.stderr}"

    def _serve(self, block: Block, text: str, urls: list[str]) -> None:
        ports = {found[0] for url in urls for found in _ADDRESS.finditer(url)}
        for taken, process, _ in self._servers:
            if taken & ports:
                self._end(process)
        log = self._folder / f"server-{len(self._servers)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603 - likewise
                self._command("bash", f"exec {text}"), cwd=self._folder, env=self._environment,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        self._servers.append((ports, process, log))
        deadline = time.monotonic() + PATIENCE
        for url in urls:
            while not _answers(url):
                assert process.poll() is None, f"{block.where} ended\n{log.read_text()}"
                assert time.monotonic() < deadline, f"{block.where}: {url} does not answer\n{log.read_text()}"
                time.sleep(0.05)

    def _here(self, text: str) -> str:
        text = _LASTS.sub(r"\1 1s", text)
        for command, default in _DEFAULTS.items():
            text = re.sub(command, lambda found, default=default: found[0] + default, text)
        return _ADDRESS.sub(self._port, text)

    def _port(self, written: re.Match[str]) -> str:
        if written[0] not in self._ports:
            self._ports[written[0]] = _free_port(self._candidates)
        return self._ports[written[0]]

    @staticmethod
    def _command(language: str, text: str) -> list[str]:
        return [sys.executable, "-c", text] if language == "python" else ["bash", "-euo", "pipefail", "-c", text]

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        """End a server; asked a second time it goes at once, without its last seconds for load balancers."""
        for patience in (0.5, PATIENCE):
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(patience)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # whatever of it did not heed that
        process.wait()


def _free_port(candidates: Iterator[int]) -> str:
    """Find a port nobody has: below those that the system hands out, or a client could meet itself there."""
    for port in candidates:
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return str(port)
    raise AssertionError("no port is free")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310 - our own server
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False
