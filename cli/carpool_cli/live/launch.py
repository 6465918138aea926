"""The sidecar as a child process: starts it, reads its log, and ends it.

The view must not share a process with the data path: drawing takes milliseconds, and would block requests.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from carpool_cli.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

KEPT = 200
"""Lines of the child's log that are kept."""

PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""

_BIND = re.compile(r"^carpool-sidecar: (?:listen|admin): (.*):(\d+): (.*): name another address")


class LaunchError(Exception):
    """The sidecar did not start; one line with the reason. ``code`` is its exit code."""

    def __init__(self, line: str, code: int) -> None:
        super().__init__(line)
        self.code = code


class Child:
    """A running sidecar. ``log`` is called with each line of its log."""

    def __init__(self, arguments: Sequence[str], log: Callable[[str], None]) -> None:
        """Start it, in a session of its own: Ctrl-C goes to the parent, which then drains it."""
        self._process = subprocess.Popen(  # noqa: S603 - our own command
            [sys.executable, "-m", "carpool_sidecar.main", *arguments],
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_end_with_parent,  # noqa: PLW1509 - no thread runs yet
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        self.lines: deque[str] = deque(maxlen=KEPT)
        self.data = self.admin = ""
        """``host:port`` of its ports, once it listens."""
        self._log = log
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_until_listening(self) -> None:
        """Wait until it listens on its ports.

        Raises ``LaunchError`` if it ends instead.
        """
        self._listening.wait()
        if not self.admin:
            raise LaunchError(_last_words(self.lines), self.wait())

    @property
    def runs(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def end(self) -> None:
        """Ask it to drain; the second time, to end at once."""
        if self.runs:
            self._process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """Wait for its end; returns the exit code."""
        code = self._process.wait()
        self._reader.join()
        return code

    def _read(self) -> None:
        assert self._process.stderr is not None  # noqa: S101 - for the type checker: it is a pipe
        with self._process.stderr as stream:
            for line in stream:
                text = line.rstrip("\n")
                self.lines.append(text)
                if not self._listening.is_set() and (event := event_of(text)).get("event") == "listening":
                    self.data, self.admin = event["data"], event["admin"]
                    self._listening.set()
                # Earlier lines are reported in the error, if it fails.
                if self._listening.is_set() or event_of(text):
                    self._log(text)
        self._listening.set()


def _end_with_parent() -> None:
    """Let Linux send SIGTERM to this process when its parent is gone, even after kill -9."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def event_of(line: str) -> dict[str, Any]:
    """Return the fields of a line of the sidecar's log; none for a line that is not a JSON object."""
    try:
        fields: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError:
        return {}
    return fields


def readable(line: str) -> str:
    """Format a line of the log for users: ``12:34:56 info     event  field=value``."""
    fields = event_of(line)
    if "event" not in fields:
        return printable(line)
    rest = "".join(f"  {name}={value}" for name, value in fields.items() if name not in {"time", "level", "event"})
    return printable(f"{str(fields.get('time', ''))[11:19]} {fields.get('level', ''):8} {fields['event']}{rest}")


def explained(line: str, path: Path, ports: dict[int, str]) -> str:
    """Return the sidecar's message when it could not start, with the fix; ``ports`` has the option of each port.

    ``path`` is the configuration file, which was generated, so it is left out of the message.
    """
    if (refused := _BIND.search(line)) is not None:
        host, port, why = refused[1], int(refused[2]), refused[3].lower()
        option = ports.get(port, "--port")
        if "in use" in why:
            return f"port {port} on {host} is taken by another process: name another with {option}"
        if "permission" in why:
            return f"port {port} may not be had without more rights: name one from 1024 on with {option}"
        if "known" in why:
            return f"the host {host} is not known here: name an address of this machine with --host"
        return f"{host} is no address of this machine: name one with --host, 0.0.0.0 for all"
    return line.removeprefix(f"{path}: ").removeprefix("carpool-sidecar: ")


def _last_words(lines: Sequence[str]) -> str:
    plain = [line for line in lines if line.strip() and not event_of(line)]
    return plain[-1] if plain else "the sidecar ended at once, without a word"
