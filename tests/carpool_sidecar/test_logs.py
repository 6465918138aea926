from __future__ import annotations

import io
import json
import logging

import pytest

from carpool_sidecar.logs import set_up


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def root():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_line_is_json_with_its_fields(root):
    stream = io.StringIO()
    set_up("Info", stream)
    logging.getLogger("carpool").info("parameters changed", extra={"model": "m", "odd": {1, 2}})
    logging.getLogger("carpool").debug("not this")
    line = json.loads(stream.getvalue())
    assert (line["level"], line["event"], line["model"]) == ("info", "parameters changed", "m")
    assert line["time"].endswith("+00:00")


def test_an_exception_is_a_field(root):
    stream = io.StringIO()
    set_up("Warning", stream)
    try:
        int("no")
    except ValueError:
        logging.getLogger("carpool").exception("it broke")
    assert "ValueError: invalid literal" in json.loads(stream.getvalue())["exception"]


def test_a_terminal_gets_lines_for_people(root):
    stream = Terminal()
    set_up("Info", stream)
    logging.getLogger("carpool").warning("a request is not batched", extra={"model": "m"})
    assert "warning  a request is not batched  model=m\n" in stream.getvalue()
