from __future__ import annotations

import json
import logging

import pytest

from carpool_operator.logs import set_up


@pytest.fixture
def restored():
    root = logging.getLogger()
    names = ("", "kopf", "aiohttp", "urllib3")
    handlers, levels = root.handlers[:], {name: logging.getLogger(name).level for name in names}
    running = logging.getLogger("kopf._core.reactor.running")
    filters = running.filters[:]
    yield
    root.handlers[:] = handlers
    running.filters[:] = filters
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def lines(capsys):
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_line_is_an_object(restored, capsys):
    set_up("Info")
    logging.getLogger("carpool").info("leading", extra={"generation": 7})
    logging.getLogger("carpool").debug("not told")
    logging.getLogger("kopf.objects").info("a line for every event")

    (line,) = lines(capsys)
    assert (line["level"], line["logger"], line["event"], line["generation"]) == ("info", "carpool", "leading", 7)


def test_a_fault_has_its_traceback(restored, capsys):
    set_up("Debug")
    try:
        raise ZeroDivisionError("a mistake")  # noqa: TRY301 - to have one
    except ZeroDivisionError:
        logging.getLogger("carpool").exception("a fault")

    (line,) = lines(capsys)
    assert "ZeroDivisionError: a mistake" in line["exception"]


def test_that_kopf_does_not_see_signals_is_meant_so(restored, capsys):
    set_up("Debug")
    logging.getLogger("kopf._core.reactor.running").warning("OS signals are ignored: running not in the main thread.")

    assert lines(capsys) == []
