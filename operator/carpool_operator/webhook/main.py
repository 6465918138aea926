"""The command ``carpool-injector``: the webhook, its certificates, and the cluster objects that it reads."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import ssl
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from carpool_operator.api import annotations as names
from carpool_operator.cluster.kube import ApiError, ConfigException, connect
from carpool_operator.injector.decide import ADMIN_PORT, DATA_PORT, DEFAULT_RESOURCES, InjectorSettings, is_secret_name
from carpool_operator.injector.ports import port_number
from carpool_operator.injector.reasons import Skipped
from carpool_operator.injector.resources import Written, of_sidecar
from carpool_operator.logs import set_up
from carpool_operator.webhook import store
from carpool_operator.webhook.certificates import Pair
from carpool_operator.webhook.namespaces import Namespaces
from carpool_operator.webhook.server import BUFFER, Injector
from carpool_operator.webhook.tls import ServingContext

if TYPE_CHECKING:
    from collections.abc import Callable

    from carpool_operator.injector.resources import Resources

OK, CANNOT_START = 0, 3
"""Exit codes: stopped by a signal; no cluster, or a port is not available."""

LAME = 5.0
"""Seconds that it still answers after SIGTERM, while API servers still call it."""
FINISH = 10.0
"""Seconds that answers in progress may then take."""

log = logging.getLogger("carpool.injector")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    set_up(options.log.capitalize())
    settings = _settings(parser, options)
    try:
        asyncio.run(_run(options, Injector(settings)))
    except (OSError, ConfigException) as error:
        sys.stderr.write(f"carpool-injector: {error}\n")
        return CANNOT_START
    return OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="carpool-injector",
        description="Puts the sidecar into pods as they are created: an admission webhook.",
        epilog="SIGTERM: unready at once, answers for 5 s more, finishes accepted requests, ends.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('carpool-serving')}")
    parser.add_argument("--sidecar-image", required=True, metavar="IMAGE", help="image of the sidecar")
    parser.add_argument("--sidecar-pull-policy", choices=("Always", "IfNotPresent", "Never"), help="of that image")
    parser.add_argument(
        "--sidecar-pull-secret",
        type=_secret,
        action="append",
        default=[],
        metavar="NAME",
        help="Secret in the pod's namespace to pull it with, beside the pod's own; may be repeated",
    )
    parser.add_argument("--sidecar-cpu", default="500m", metavar="CPU", help="CPU that a sidecar requests (500m)")
    parser.add_argument("--sidecar-cpu-limit", metavar="CPU", help="its CPU limit (none)")
    parser.add_argument("--sidecar-memory", default="512Mi", metavar="SIZE", help="its memory limit (512Mi)")
    parser.add_argument("--sidecar-memory-request", metavar="SIZE", help="its memory request (a quarter of the limit)")
    parser.add_argument("--sidecar-data-port", type=_port, default=DATA_PORT, help=f"its port ({DATA_PORT})")
    parser.add_argument(
        "--sidecar-admin-port", type=_port, default=ADMIN_PORT, help=f"its port for probes and metrics ({ADMIN_PORT})"
    )
    parser.add_argument(
        "--sidecar-user", type=int, default=65532, metavar="UID", help="its user (65532); -1: the platform's choice"
    )
    parser.add_argument("--port", type=int, default=8443, help="for API servers, TLS (8443)")
    parser.add_argument("--metrics-port", type=int, default=8080, help="for /metrics, /livez, /readyz (8080)")
    parser.add_argument(
        "--namespace",
        default=os.environ.get("POD_NAMESPACE", "carpool-system"),
        help="the injector's own (POD_NAMESPACE)",
    )
    parser.add_argument(
        "--cert-dir", type=Path, metavar="DIR", help="serve tls.crt and tls.key from there, watched; else its own"
    )
    parser.add_argument("--kubeconfig", metavar="FILE", help="cluster to work in, where it isn't the one it runs in")
    parser.add_argument("--interval", type=float, default=10.0, metavar="SECONDS", help="between two readings (10)")
    parser.add_argument(
        "--log", choices=("debug", "info", "warning", "error"), default="info", help="least severe lines"
    )
    return parser


def _port(text: str) -> int:
    number = port_number(text)
    if number is None or not 1024 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r}: write a number from 1024 to 65535")
    return number


def _secret(text: str) -> str:
    if not is_secret_name(text):
        raise argparse.ArgumentTypeError(f"{text!r}: write the name of a Secret")
    return text


def _settings(parser: argparse.ArgumentParser, options: argparse.Namespace) -> InjectorSettings:
    """Return the settings of all sidecars; exits the process if they are invalid."""
    if options.sidecar_data_port == options.sidecar_admin_port:
        parser.error(
            f"--sidecar-data-port and --sidecar-admin-port are both {options.sidecar_data_port}: they have to differ"
        )
    return InjectorSettings(
        image=options.sidecar_image,
        version=version("carpool-serving"),
        pull_policy=options.sidecar_pull_policy,
        pull_secrets=tuple(options.sidecar_pull_secret),
        user=None if options.sidecar_user < 0 else options.sidecar_user,
        resources=_resources(parser, options),
        data_port=options.sidecar_data_port,
        admin_port=options.sidecar_admin_port,
    )


def _resources(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Resources:
    """Read the sidecars' resources, in the annotations' format; exits the process if they are invalid."""
    written = {
        names.CPU: options.sidecar_cpu,
        names.CPU_LIMIT: options.sidecar_cpu_limit,
        names.MEMORY: options.sidecar_memory,
        names.MEMORY_REQUEST: options.sidecar_memory_request,
    }
    try:
        return of_sidecar(Written({key: value for key, value in written.items() if value}), DEFAULT_RESOURCES)
    except Skipped as wrong:
        parser.error(str(wrong).replace(names.PREFIX, "--"))


class Upkeep:
    """Keeps certificates and the public key current, one check after the other."""

    def __init__(
        self,
        injector: Injector,
        context: ServingContext,
        server: store.Server,
        names: store.Names,
        *,
        folder: Path | None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._injector = injector
        self._context = context
        self._server = server
        self._names = names
        self._folder = folder
        self._wall = wall

    async def look(self) -> None:
        """Check once. Failures are logged and counted; the previous values stay in use."""
        for part in (self._public_key, self._certificate):
            try:
                await part()
            except (ApiError, OSError, ValueError, msgspec.DecodeError) as error:
                self._injector.sync_failures.inc()
                log.warning("%s; it is tried again", error)

    async def _public_key(self) -> None:
        injector = self._injector
        found = await store.public_key(self._server, self._names)
        # A deleted key stays in use: sidecars have it, and the operator will publish it again.
        if found not in {None, injector.settings.public_key}:
            injector.settings = msgspec.structs.replace(injector.settings, public_key=found)
            log.info("the operator's public key is %s", found)

    async def _certificate(self) -> None:
        if self._folder is None:
            pair = (await store.material(self._server, self._names, self._wall())).current
        else:
            pair = Pair((self._folder / "tls.crt").read_bytes(), (self._folder / "tls.key").read_bytes())
        try:
            if self._context.load(*pair):
                log.info("serving a certificate that is good until %s", time.strftime("%F %T", time.gmtime(pair.ends)))
        except ssl.SSLError as error:
            raise ValueError(f"the certificate and its key can't be loaded: {error}") from None
        self._injector.certificate_ends.set(pair.ends)
        self._injector.certificate = True


async def _run(options: argparse.Namespace, injector: Injector) -> None:
    names = store.Names(options.namespace)
    kube, context, stopping = connect(options.kubeconfig, workers=6), ServingContext(), asyncio.Event()
    injector.around = Namespaces(kube, time.monotonic, injector.sync_failures.inc).around
    upkeep = Upkeep(injector, context, kube, names, folder=options.cert_dir)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    runners = [
        web.AppRunner(app, access_log=None, shutdown_timeout=FINISH, handle_signals=False, read_bufsize=BUFFER)
        for app in (injector.admin(), injector.webhook())
    ]
    try:
        for runner in runners:
            await runner.setup()
        await web.TCPSite(runners[0], None, options.metrics_port).start()
        await upkeep.look()
        await web.TCPSite(runners[1], None, options.port, ssl_context=context.context).start()
        log.info("answering at port %d", options.port)
        while not stopping.is_set():
            try:
                # While something is missing, pods or users wait for it.
                async with asyncio.timeout(min(options.interval, 1.0) if injector.problem else options.interval):
                    await stopping.wait()
            except TimeoutError:
                await upkeep.look()
        injector.draining = True
        log.info("draining")
        await asyncio.sleep(LAME)
    finally:
        for runner in reversed(runners):
            await runner.cleanup()
        kube.close()


if __name__ == "__main__":
    sys.exit(main())
