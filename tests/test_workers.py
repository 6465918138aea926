"""How ``make test`` divides the tests among its workers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

FILE = """
import pathlib
import pytest

@pytest.fixture(scope="module")
def made(request):
    with open("made", "a") as file:
        file.write(pathlib.Path(request.path).name + "\\n")

@pytest.mark.parametrize("number", range(4))
def test(made, number):
    pass
"""


def test_what_the_tests_of_a_file_share_is_made_once(tmp_path):
    options = re.search(r"-m pytest (-n .*)", (ROOT / "Makefile").read_text("utf-8"))[1].split()
    names = [f"test_{number}.py" for number in range(4)]
    for name in names:
        (tmp_path / name).write_text(FILE)
    # tests/conftest.py is a plugin here: all but the tests is as in `make test`.
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir=.", "-p", "conftest", *options, *names]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)  # noqa: S603 - our own tests
    assert "16 passed" in done.stdout, done.stdout + done.stderr
    assert sorted((tmp_path / "made").read_text().split()) == names
