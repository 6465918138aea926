from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROGRAMS = sorted(path.name for path in BENCHMARKS.glob("*.py") if "main())" in path.read_text())


def ask(program, *arguments):
    return subprocess.run(  # noqa: S603 - our own program
        [sys.executable, str(BENCHMARKS / program), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_says_what_a_program_does_and_an_unknown_option_starts_nothing(program):
    helped = ask(program, "--help")
    assert (helped.returncode, helped.stderr) == (0, "")
    assert helped.stdout.startswith("usage: ")
    assert ask(program, "--no-such-option").returncode == 2


def test_an_unknown_scenario_is_an_error_with_those_that_are_known():
    refused = ask("live_capacity.py", "typo")
    assert refused.returncode == 2
    assert "'tiles-32'" in refused.stderr
