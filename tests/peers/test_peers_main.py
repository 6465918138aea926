"""The command line."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("peers_main", BENCHMARKS / "peers" / "__main__.py")
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def test_rates_ascend(program):
    assert program.rates("60,200,400") == [60.0, 200.0, 400.0]
    for wrong in ("200,60", "0,5"):
        with pytest.raises(argparse.ArgumentTypeError, match="ascending"):
            program.rates(wrong)


def test_faults_are_tried_where_load_alone_loses_nothing(program):
    def seen(*shares):
        return [
            SimpleNamespace(rate=rate, good_share=share) for rate, share in zip((60, 200, 400), shares, strict=True)
        ]

    assert program.fault_rate(seen(1.0, 0.95, 0.2)) == 200
    assert program.fault_rate(seen(0.99, 0.3, 0.92)) == 400
    assert program.fault_rate(seen(0.5, 0.3, 0.0)) == 60


def test_engines_are_named(program, capsys):
    told = program.parser().parse_args(["mosec", "--rates", "10,20"])
    assert told.engine == ["mosec"]
    assert told.rates == [10.0, 20.0]
    for arguments in ([], ["torchserve"]):
        with pytest.raises(SystemExit):
            program.main(arguments)
        assert "mosec" in capsys.readouterr().err
