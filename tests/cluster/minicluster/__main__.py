"""Open a cluster for a person, or for one command, and end it with everything in it.

python -m minicluster [--no-chart] [COMMAND ...]
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from minicluster import binaries, carpool
from minicluster.cluster import Cluster

if TYPE_CHECKING:
    from types import FrameType

NAME = "resnet"
ENDING = (signal.SIGTERM, signal.SIGHUP)
HELP = f"""
A cluster of your own: a real API server, a node that runs Pods as processes of this machine.
You are inside its network: pod IPs can be reached, nothing outside can. `exit` ends all of it.

  kubectl get pods -A
  kubectl annotate deployment/{NAME} carpool.dev/slo-p99=100ms     # its pods roll, each with a sidecar
  kubectl get batchingpolicies --watch
  cluster-load {NAME} 50                                           # 50 requests a second, until Ctrl-C or `exit`

`kubectl logs` works, `kubectl exec` and `port-forward` do not (there is no kubelet for them): use pod IPs.
State and logs of the control plane: {{folder}}
"""


def main() -> int:
    """Return the command's or the shell's exit code."""
    parser = argparse.ArgumentParser(prog="make cluster", description=__doc__)
    parser.add_argument("--no-chart", action="store_true", help="only the control plane and the node")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="run it inside instead of a shell")
    arguments = parser.parse_args()
    # What would end us ends the cluster first.
    for number in ENDING:
        signal.signal(number, _leave)
    cluster = Cluster()
    try:
        return _serve(cluster, arguments.command, chart=not arguments.no_chart)
    except KeyboardInterrupt:
        return 130
    except (RuntimeError, AssertionError) as error:
        _say(str(error))
        return 1
    finally:
        cluster.stop()


def _serve(cluster: Cluster, command: list[str], *, chart: bool) -> int:
    """Start all, and run a command or a shell in it."""
    _say("starting ...")
    cluster.start()
    cluster.enter()
    if chart:
        if not {"kubectl", "helm"} <= binaries.find().keys():
            _say("no helm or no kubectl at hand, so no chart: `make test-cluster` gets them")
        else:
            _say("installing the chart and a model ...")
            with closing(cluster.api()) as api:
                carpool.install(cluster, api)
                api.apply(*carpool.model(NAME), namespace="default")
                api.until_ready(NAME, "default")
    if not command:
        sys.stderr.write(HELP.format(folder=cluster.folder))
        command = [os.environ.get("SHELL", "/bin/sh")]
    environment = cluster.environment()
    environment["PATH"] = f"{_commands(cluster.folder)}:{environment['PATH']}"
    # From here on signals are noted, not raised: wherever one came, the child would be left behind or waited for.
    # Ctrl-C is for what runs in the shell. Handlers, as nothing else of this is handed on to the child.
    noted: list[int] = []
    signal.signal(signal.SIGINT, lambda *_: None)
    for number in ENDING:
        signal.signal(number, lambda number, _: noted.append(number))
    with subprocess.Popen(command, env=environment) as child:  # noqa: S603 - what the person says
        while not noted:
            with suppress(subprocess.TimeoutExpired):
                return child.wait(timeout=1.0)
        child.terminate()
    return 128 + noted[0]


def _commands(folder: Path) -> Path:
    """Make a folder with what a person can type."""
    load = folder / "bin" / "cluster-load"
    load.parent.mkdir()
    library = Path(__file__).parent.parent
    load.write_text(f'#!/bin/sh\nPYTHONPATH="{library}" exec "{sys.executable}" -m minicluster.load "$@"\n')
    load.chmod(0o755)
    return load.parent


def _leave(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _say(text: str) -> None:
    sys.stderr.write(f"cluster: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
