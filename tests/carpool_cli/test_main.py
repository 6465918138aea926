from __future__ import annotations

import errno
import importlib
import re
import subprocess
import sys

import click
import msgspec
import pytest

from carpool.exchange.report import Report as Counted
from carpool_cli.live.admin_client import Explanation
from carpool_cli.live.figures import Figures
from carpool_cli.load.report import Report
from carpool_cli.main import COMMANDS, main
from carpool_cli.planning.recommending import Recommendation
from carpool_cli.planning.simulating import Figures as Simulated
from carpool_cli.planning.what_if import WhatIf
from carpool_cli.profiling.device_profile import DeviceProfile

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
    assert ended.stderr == "carpool: the commands need the extra `cli`: in Carpool's folder, pip install '.[cli]'\n"


FLAGS = {"--json", "--verify", "--fixed", "--tune"}
SYNONYMS = {"--name", "--slo", "--gamma-cv", "--largest-batch", "--longest-wait", "--most-in-flight"}
"""Other words for --model, --slo-p99, --cv, --max-batch, --max-wait and --max-in-flight."""


def options():
    """Every option of every subcommand."""
    for name in COMMANDS:
        for option in main.get_command(None, name).params:
            if isinstance(option, click.Option):
                yield name, option


def test_one_word_stands_for_one_kind_of_option_in_all_commands():
    kinds = {}
    for name, option in options():
        long = [word for word in option.opts if word.startswith("--")]
        assert len(long) == 1, f"carpool {name}: {option.opts} are words for one option"
        assert long[0] not in SYNONYMS, f"carpool {name} {long[0]}"
        assert option.is_flag or long[0] not in FLAGS, f"carpool {name} {long[0]}"
        kind = "file" if isinstance(option.type, click.Path) else option.type.name
        if long[0] in {"--rate", "--upstream"}:
            kind = "text"  # several rates for `bench`, and Unix sockets for `up`
        kinds.setdefault(long[0], {}).setdefault(kind, []).append(name)
    assert not {word: found for word, found in kinds.items() if len(found) > 1}


KEYS = re.compile(r"[a-z][A-Za-z0-9]*")


def keys_of(kind, seen):
    """Yield the keys that structs are written with, those inside them included."""
    found = msgspec.inspect.type_info(kind)
    for struct in walk(found):
        if struct.cls not in seen:
            seen.add(struct.cls)
            yield from (field.encode_name for field in struct.fields)
            for field in struct.fields:
                for inner in walk(field.type):
                    yield from keys_of(inner.cls, seen)


def walk(kind):
    """Yield the structs in a type."""
    if isinstance(kind, msgspec.inspect.StructType):
        yield kind
    for name in ("types", "item_types"):
        for inner in getattr(kind, name, ()):
            yield from walk(inner)
    for name in ("item_type", "value_type"):
        if hasattr(kind, name):
            yield from walk(getattr(kind, name))


@pytest.mark.parametrize(
    "kind", [Report, Counted, Explanation, Figures, Recommendation, WhatIf, Simulated, DeviceProfile]
)
def test_all_that_is_written_as_json_has_keys_in_camel_case(kind):
    keys = list(keys_of(kind, set()))
    assert len(keys) > 3
    assert not [key for key in keys if not KEYS.fullmatch(key)]


def test_a_file_that_can_not_be_written_is_one_line(carpool, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "p.json"))

    profile = DeviceProfile(name="d", source="s", executors=1, rows=(1, 8), seconds=(0.01, 0.02), cv=0.0)
    (tmp_path / "d.json").write_bytes(msgspec.json.encode(profile))
    monkeypatch.setattr("carpool_cli.commands.recommend.recommend", full)
    result = carpool("recommend", "--profile", str(tmp_path / "d.json"), "--slo-p99", "50ms", "--rate", "10")
    assert result.exit_code == 1
    assert result.output == f"Error: {tmp_path / 'p.json'}: No space left on device\n"


@pytest.mark.parametrize("name", ["simulate", "recommend"])
def test_a_rate_that_is_no_number_is_refused(name, carpool):
    result = carpool(name, "--profile", "none.json", "--slo-p99", "50ms", "--rate", "nan")
    assert result.exit_code == 2
    assert "'nan': write a number" in result.output


def test_ctrl_c_is_one_line_and_the_exit_code_of_a_signal(carpool, monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("carpool_cli.profiling.device_profile.load", stopped)
    result = carpool("simulate", "--profile", "x.json", "--slo-p99", "50ms", "--rate", 10)
    assert (result.exit_code, result.output) == (130, "Error: stopped\n")
