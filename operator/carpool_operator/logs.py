"""Structured logs: one JSON object per line, on standard error.

The sidecar's logs look the same; neither may import the other, and the core has no logging.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

import msgspec

LEVELS = ("Debug", "Info", "Warning", "Error")

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
    "settings",
    "k8s_skip",
    "k8s_ref",
}
"""Attributes of every record, and those that kopf adds to its own."""


class JsonLines(logging.Formatter):
    """``{"time": ..., "level": ..., "event": ..., fields}``; fields are those passed as ``extra``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its line end."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **{name: value for name, value in vars(record).items() if name not in _OWN},
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def set_up(level: str) -> None:
    """Send all logs of this process to standard error; ``level`` is one of ``LEVELS``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    if level != "Debug":
        # It logs a line for every event and every request.
        for name in ("kopf", "aiohttp", "urllib3"):
            logging.getLogger(name).setLevel(logging.WARNING)
    # It runs in a thread of ours, and is not meant to receive signals.
    logging.getLogger("kopf._core.reactor.running").addFilter(lambda record: "OS signals" not in record.getMessage())
