"""Structured logs: one JSON object a line, or a readable line on a terminal.

It uses the standard library's logging with a formatter: asyncio loads that anyway, while structlog costs 6 MiB and
64 ms of CPU at start.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

if TYPE_CHECKING:
    from typing import Literal

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields that were passed as ``extra``."""
    return {name: value for name, value in vars(record).items() if name not in _OWN}


class JsonLines(logging.Formatter):
    """``{"time": ..., "level": ..., "event": ..., fields}``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


class Console(logging.Formatter):
    """``12:34:56.789 info     event  field=value``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S.%f")[:-3]
        fields = "".join(f"  {name}={value}" for name, value in fields_of(record).items())
        line = f"{time} {record.levelname.lower():8} {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def set_up(level: Literal["Debug", "Info", "Warning", "Error"], stream: TextIO | None = None) -> None:
    """Send all logs of this process to a stream, by default standard error."""
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(Console() if stream.isatty() else JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
