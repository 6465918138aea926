"""A sidecar as a real process in front of a model server that is another, for clients that know nothing of either."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
import requests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE = 30.0
# 20 ms a batch whatever its size: callers who come within that meet in the next one.
DEVICE = {"name": "slow", "source": "synthetic", "executors": 1, "rows": [1, 64], "seconds": [0.02, 0.02]}
POLICY = {"slo": {"latency": {"p99": "5s"}}}
ENGINE = {
    "name": "fast", "source": "synthetic", "kvTokens": 10_000,
    "step": {"form": "linear", "base": 0.002, "sequence": 1e-5, "kvToken": 1e-9, "promptToken": 1e-6},
}  # fmt: skip
GATED = {"slo": {"ttft": {"p99": "1s"}, "tpot": {"p99": "1s"}}, "generation": {"maxRunning": 1}}


class Served(NamedTuple):
    """Addresses (host:port) of a sidecar's two ports and of the model server behind it."""

    data: str
    admin: str
    upstream: str

    def models(self) -> dict[str, dict[str, object]]:
        """What the sidecar says of each model, by name."""
        return {one["name"]: one for one in read(f"http://{self.admin}/v1/stats")["models"]}

    def await_axes(self, models: set[str]) -> None:
        """Wait until the sidecar has asked the model server about the batch axes of models that it has seen."""
        deadline = time.monotonic() + PATIENCE
        while not models <= {name for name, one in self.models().items() if "not been asked" not in one["axis"]}:
            assert time.monotonic() < deadline, "a batch axis was not found out"

    def most_rows(self) -> int:
        """Return the largest batch that the standin behind it has seen."""
        return max(map(int, read(f"http://{self.upstream}/stats")["batches"]))


def read(url):
    return requests.get(url, timeout=PATIENCE).json()


@contextmanager
def running(
    folder: Path, upstream: str, policy: dict[str, object] = POLICY, jobs: dict[str, object] | None = None
) -> Iterator[Served]:
    """A sidecar in a process of its own, which must end without an error in its log."""
    config = folder / "sidecar.json"
    config.write_text(
        json.dumps(
            {
                "listen": "127.0.0.1:0",
                "admin": "127.0.0.1:0",
                "upstream": {"url": f"http://{upstream}"},
                "shutdown": {"lame": "0s"},
                "parameters": {"*": {"maxBatch": 16, "maxInFlight": 1}},
                "policy": policy,
            }
            | ({} if jobs is None else {"jobs": jobs})
        )
    )
    process = subprocess.Popen(  # noqa: S603 - our own command
        [sys.executable, "-m", "carpool_sidecar.main", "--config", str(config)], stderr=subprocess.PIPE, text=True
    )
    try:
        line = json.loads(process.stderr.readline())
        assert line["event"] == "listening", line
        yield Served(line["data"], line["admin"], upstream)
    finally:
        process.terminate()
        log = process.communicate(timeout=PATIENCE)[1]
        assert process.returncode == 0, log
        assert '"level":"error"' not in log, log


@pytest.fixture(scope="session")
def in_front_of(tmp_path_factory) -> Iterator[Callable[[str], Served]]:
    """Starts a sidecar in front of a model server's address; it ends with the session."""
    with ExitStack() as stack:
        yield lambda upstream: stack.enter_context(running(tmp_path_factory.mktemp("sidecar"), upstream))


@pytest.fixture(scope="session")
def standin(tmp_path_factory) -> Iterator[str]:
    """The address of a model server that echoes, V1 and V2."""
    with standing_in(tmp_path_factory.mktemp("standin"), DEVICE) as address:
        yield address


@contextmanager
def standing_in(folder: Path, described: dict[str, object]) -> Iterator[str]:
    """A stand-in in a process of its own, and its address."""
    profile = folder / "device.json"
    profile.write_text(json.dumps(described))
    process = subprocess.Popen(  # noqa: S603 - our own command
        [sys.executable, "-m", "carpool_cli", "standin", "--profile", str(profile), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process.stdout.readline().split(" at http://")[1].strip()
    process.terminate()
    process.stdout.close()
    assert process.wait(PATIENCE) == 0


@pytest.fixture(scope="session")
def served(standin, in_front_of) -> Served:
    served = in_front_of(standin)
    requests.post(f"http://{served.data}/v1/models/standin:predict", json={"instances": [[0]]}, timeout=PATIENCE)
    served.await_axes({"standin"})
    return served


@pytest.fixture
def gated(tmp_path) -> Iterator[Served]:
    """A sidecar with a gate, in front of a stand-in for a language model's server."""
    with standing_in(tmp_path, ENGINE) as upstream, running(tmp_path, upstream, GATED) as served:
        yield served


@pytest.fixture
def chatting(tmp_path) -> Iterator[Served]:
    """A sidecar with a gate, in front of a server that has tools and logprobs; it says on ``/seen`` what it got."""
    engine = Path(__file__).parent / "tools" / "engine.py"
    process = subprocess.Popen([sys.executable, str(engine)], stdout=subprocess.PIPE, text=True)  # noqa: S603 - our own
    try:
        with running(tmp_path, process.stdout.readline().strip(), GATED) as served:
            yield served
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE)


@pytest.fixture
def keeping_jobs(tmp_path) -> Iterator[Served]:
    """A sidecar that keeps jobs, in front of the same."""
    with (
        standing_in(tmp_path, ENGINE) as upstream,
        running(tmp_path, upstream, jobs={"path": str(tmp_path / "jobs.db")}) as served,
    ):
        yield served
