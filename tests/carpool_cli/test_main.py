from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from carpool_cli.main import COMMANDS

HEAVY = ("numpy", "onnxruntime", "matplotlib", "rich", "uvloop")


def test_help_imports_nothing_heavy():
    code = f"""
import sys
from carpool_cli.main import main
main(["--help"], standalone_mode=False)
print("heavy:", [name for name in {HEAVY} if name in sys.modules])
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout  # noqa: S603 - our own command
    assert "heavy: []" in shown
    assert all(name in shown for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_and_defaults(name, carpool):
    shown = carpool(name, "--help").output
    assert "Examples:" in shown
    assert f"carpool {name}" in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_imports_numpy_before_it_runs(name):
    module = COMMANDS[name].module
    assert importlib.import_module(module).command.name == "command" or importlib.import_module(module).command.help
    code = f"import sys, {module}; print([n for n in {HEAVY[:3]} if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"  # noqa: S603 - our own command


def test_a_wrong_command_is_one_line(carpool):
    result = carpool("brew")
    assert result.exit_code == 2
    assert result.output == "Error: No such command 'brew'. (carpool --help)\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_option_is_one_line_that_names_the_help(name, carpool):
    result = carpool(name, "--no-such")
    assert result.exit_code == 2
    assert result.output.startswith("Error: No such option '--no-such'")
    assert result.output.endswith(f"(carpool {name} --help)\n")
    assert result.output.count("\n") == 1


def test_no_command_at_all_shows_the_help(carpool):
    assert "Commands:" in carpool().output


def test_without_its_extra_it_says_what_to_install():
    code = "import sys; sys.modules['click'] = None; import carpool_cli.main"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)  # noqa: S603 - our own command
    assert ended.returncode == 1
    assert ended.stderr == "carpool: the commands need the extra `cli`: pip install '.[cli]'\n"
