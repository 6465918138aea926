"""What holds for all tests."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

sys.path.insert(0, str(Path(__file__).parent / "cluster"))
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import compiled
from minicluster import binaries

CLUSTER = Path(__file__).parent / "cluster"
BATCHING = Path(__file__).parent / "carpool" / "batching"
LONGEST = {"test_story_faults.py", "test_prometheus.py", "test_autoscaling.py"}
"""Files on a cluster that take minutes. They begin first: in the end the workers share what is short."""
FIRST = "gw0"
"""Name of the first worker."""
NOT_COMPILED = pytest.StashKey[str]()
"""Why there is no machine code, although it was asked for."""

# Before its first async test pytest-asyncio asks for the current loop and, up to Python 3.11, gets a new one that none
# closes: a warning, so an error, in whichever test the garbage is collected. Once set to None there is none to get.
asyncio.set_event_loop(None)

# Then a test that is skipped fails the run, and what Hypothesis tries is the same every time, so that what fails is the
# change's doing: CI and `make test-cluster` set it. Everybody else's runs go on searching.
ALL_REQUIRED = "CARPOOL_ALL_TESTS"

# This machine pauses for half a second now and then: how long an example took says nothing of the code.
settings.register_profile(
    "untimed",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get(ALL_REQUIRED)),
)
settings.load_profile("untimed")


class FromBothEnds(LoadFileScheduling):
    """Give each file to one worker, so that its fixtures are made once; the first worker takes files from one end.

    The tests on a cluster stand at that end, and mostly wait: meanwhile the other workers use the cores. A worker that
    comes to the middle first takes what is left beyond it. (Under pytest 9.2, xdist 3.8 ignores the groups of
    ``--dist loadgroup``, and divides files: https://github.com/pytest-dev/pytest-xdist/issues/1386.)
    """

    def _assign_work_unit(self, node):
        if node.gateway.id != FIRST:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)


def pytest_xdist_make_scheduler(config, log):
    return FromBothEnds(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_addoption(parser):
    parser.addoption(
        "--machine-code",
        action="store_true",
        help="the core is machine code, as in wheels, which takes half the time; with -n: not in the first worker",
    )


def pytest_configure(config):
    """Make the core's machine code, or use what the process that started this worker has made."""
    worker = getattr(config, "workerinput", {}).get("workerid")
    if config.getoption("machine_code") and worker != FIRST:
        try:
            folder = compiled.folder()
        except compiled.NotCompiledError as error:
            config.stash[NOT_COMPILED] = str(error).splitlines()[0]
        else:
            sys.path.insert(0, str(folder))


def pytest_collection_modifyitems(items):
    """What is of the sources goes first, then what is on a cluster: the first worker has both."""
    sources = {item.path for item in items if item.get_closest_marker("pure") or item.path.is_relative_to(BATCHING)}

    def place(item):
        is_long = item.path.is_relative_to(CLUSTER) and item.path.name in LONGEST
        return item.path not in sources, not item.path.is_relative_to(CLUSTER), not is_long

    items.sort(key=place)


@pytest.fixture(scope="session")
def program():
    """Return the path of a program by its name; what needs one that is not at hand is skipped, and the end says so."""

    def find(name: str) -> Path:
        path = binaries.find().get(name)
        if path is None:
            pytest.skip(f"{name} is not at hand: `make test-cluster` gets it first")
        return path

    return find


def pytest_sessionfinish(session):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get(ALL_REQUIRED) and reporter is not None and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    """Say what was skipped, and why: in a line of dots nobody sees it."""
    if NOT_COMPILED in config.stash:
        terminalreporter.line(f"all on the sources, nothing on machine code: {config.stash[NOT_COMPILED]}", yellow=True)
    reasons = Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", ()))
    if reasons:
        terminalreporter.section("SKIPPED", yellow=True, bold=True)
    for reason, count in reasons.items():
        terminalreporter.line(f"{count} tests: {reason.removeprefix('Skipped: ')}", yellow=True)
