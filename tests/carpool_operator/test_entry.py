"""The commands get SIGTERM while they load."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from carpool_operator import entry

TOLD_AS_IT_LOADS = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[2]:
            print(*{"aiohttp", "asyncio", "kubernetes", "msgspec"} & sys.modules.keys(), flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, Finder())
from carpool_operator import entry
getattr(entry, sys.argv[1])()
"""


@pytest.mark.parametrize(
    ("command", "module"),
    [("operator", "carpool_operator.main"), ("injector", "carpool_operator.webhook.main")],
)
def test_sigterm_while_modules_load_ends_the_process_with_exit_code_0(command, module):
    """Without a handler a process ends with exit code -15; the first process of a container would not even end."""
    child = [sys.executable, "-c", TOLD_AS_IT_LOADS, command, module]
    done = subprocess.run(child, capture_output=True, text=True, timeout=60, check=False)  # noqa: S603 - the code above

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "\n"  # nothing that takes long was loaded before


@pytest.mark.parametrize("command", ["operator", "injector"])
def test_the_commands_begin_there(command):
    (found,) = entry_points(group="console_scripts", name=f"carpool-{command}")
    assert found.load() is getattr(entry, command)


@pytest.mark.parametrize(("command", "missing"), [("operator", "kubernetes"), ("injector", "aiohttp")])
def test_without_their_extra_they_say_what_to_install(command, missing):
    code = f"import sys; sys.modules[{missing!r}] = None; from carpool_operator import entry; entry.{command}()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)  # noqa: S603 - ours
    assert done.returncode == 1
    assert done.stderr == (
        f"carpool-{command} needs {missing}, which comes with the extra `operator`: in Carpool's folder, "
        "pip install '.[operator]'\n"
    )
