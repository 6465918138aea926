"""The command ``carpool-operator``: watches policies, and tunes the sidecars of their workloads."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import sys
import uuid
from importlib.metadata import version

from carpool.policy.durations import Duration
from carpool_operator.api import annotations as names
from carpool_operator.assembly import Settings, run
from carpool_operator.cluster.kube import ConfigException, connect
from carpool_operator.cluster.sharding import Shard
from carpool_operator.logs import LEVELS, set_up

OK, FAILED, NO_CLUSTER = 0, 1, 2
"""Exit codes: stopped by a signal; a part failed for good; the cluster's address or a port is not available."""

DEEPEST = 12_000
"""Python's limit of recursion. API servers store JSON nested up to 10,000 levels deep, where a CRD has fields of
any content, and with the usual 1,000 one such object ended the operator. It takes less than 2 MiB of stack."""

EPILOG = """\
Run two or more: one leads (Lease --lease-name in --namespace), the others are ready to. It keeps everything in the
cluster: parameters in ConfigMaps beside the workloads, its key in the Secret carpool-signing-key. Without any operator
running the sidecars keep their parameters and their own safety rules.

It connects by --kubeconfig or $KUBECONFIG where there is one, else as its pod's service account.

port --metrics-port: /metrics (Prometheus), /livez (503 when a watch or the loop is stuck), /readyz (503 before all has
been listed once).

signals: SIGTERM and SIGINT finish the writes in work, release the lease and end it.

exit codes: 0 stopped by a signal, 1 a part of it failed for good (the log says which), 2 no cluster to connect to or no
port.
"""


def parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    options = argparse.ArgumentParser(
        prog="carpool-operator",
        description="Watches BatchingPolicies and annotated workloads, and tunes the sidecars in their pods.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--version", action="version", version=f"%(prog)s {version('carpool-serving')}")
    _add_places(options)
    options.add_argument(
        "--interval",
        type=_duration,
        default=Duration(2.0),
        metavar="DURATION",
        help="between two passes over all policies; longer where they would take more than half a core, or a "
        "whole one while policies wait (default: 2s)",
    )
    options.add_argument(
        "--resync",
        type=_duration,
        default=Duration(300.0),
        metavar="DURATION",
        help="between two lists of everything, which find what events left out (default: 5m)",
    )
    options.add_argument(
        "--default",
        action="append",
        default=[],
        type=_default,
        metavar="NAME=VALUE",
        help="annotation of workloads that ask for a sidecar, where neither they nor their namespace have it: "
        "slo-p99=100ms, objective=Efficiency; repeat it for several",
    )
    options.add_argument(
        "--metrics-host", default="", metavar="ADDRESS", help="address of probes and metrics (default: all)"
    )
    options.add_argument(
        "--metrics-port", type=int, default=8080, metavar="PORT", help="port of probes and metrics (default: 8080)"
    )
    options.add_argument("--kubeconfig", metavar="FILE", help="outside a cluster: how to reach it")
    options.add_argument("--log-level", choices=LEVELS, default="Info", help="least severe lines (default: Info)")
    return options


def _add_places(options: argparse.ArgumentParser) -> None:
    """Add where it works: the namespaces that it watches, and its own objects."""
    options.add_argument(
        "--watch-namespace",
        action="append",
        default=[],
        metavar="NAMESPACE",
        help="look at this namespace only; repeat it for several (default: all)",
    )
    options.add_argument(
        "--namespace",
        default=os.environ.get("POD_NAMESPACE", "carpool-system"),
        help="where its own Lease, Secret and ConfigMap are (default: $POD_NAMESPACE, else carpool-system)",
    )
    options.add_argument(
        "--lease-name",
        default="carpool-operator",
        metavar="NAME",
        help="of the Lease; that of a shard ends in -INDEX-of-COUNT (default: carpool-operator)",
    )
    options.add_argument(
        "--shard",
        type=_shard,
        default=Shard(),
        metavar="INDEX/COUNT",
        help="look after the namespaces of this shard only, counted from 0: 0/2 and 1/2 share a cluster, each with a "
        "Lease of its own (default: 0/1, all namespaces)",
    )
    options.add_argument(
        "--identity",
        default=os.environ.get("POD_NAME") or f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}",
        metavar="NAME",
        help="its name in the Lease and in Events (default: $POD_NAME, else the host's name and a random number)",
    )


def _duration(text: str) -> Duration:
    try:
        value = Duration.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if value <= 0:
        raise argparse.ArgumentTypeError("it has to be longer than 0s")
    return value


def _shard(text: str) -> Shard:
    try:
        return Shard.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _default(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    good, problems = names.read_defaults({f"{names.PREFIX}{name.removeprefix(names.PREFIX)}": value})
    if problems:
        raise argparse.ArgumentTypeError(problems[0])
    return next(iter(good.items()))


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    given = parser().parse_args(arguments)
    set_up(given.log_level)
    log = logging.getLogger("carpool")
    settings = Settings(
        namespaces=tuple(given.watch_namespace) or (None,),
        namespace=given.namespace,
        lease=given.lease_name,
        shard=given.shard,
        identity=given.identity,
        interval=float(given.interval),
        resync=float(given.resync),
        metrics_host=given.metrics_host or None,
        metrics_port=given.metrics_port,
        defaults=dict(given.default),
    )
    try:
        kube = connect(given.kubeconfig)
    except ConfigException as error:
        log.error("no cluster to connect to", extra={"error": str(error)})  # noqa: TRY400 - no fault of the program
        return NO_CLUSTER
    sys.setrecursionlimit(DEEPEST)
    try:
        asyncio.run(run(settings, kube))
    except OSError as error:
        log.error("can't start", extra={"error": str(error)})  # noqa: TRY400 - likewise
        return NO_CLUSTER
    except Exception:
        log.exception("a part of it failed")
        return FAILED
    return OK


if __name__ == "__main__":
    sys.exit(main())
