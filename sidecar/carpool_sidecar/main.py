"""The command ``carpool-sidecar``: one process in front of one model server."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from carpool.policy.plain import PolicyError
from carpool_sidecar.admin.signatures import Authority
from carpool_sidecar.config import own_address
from carpool_sidecar.config.descriptors import raise_limit
from carpool_sidecar.config.hints import not_utf8
from carpool_sidecar.config.settings import SidecarConfig, is_address, parse, parse_injected
from carpool_sidecar.jobs.desk import credential
from carpool_sidecar.jobs.storage.database import unusable
from carpool_sidecar.llm import process
from carpool_sidecar.logs import set_up
from carpool_sidecar.sidecar import Sidecar, onnx_backend

if TYPE_CHECKING:
    from collections.abc import Sequence

OK, WRONG_CONFIG, CANNOT_START, CUT_SHORT = 0, 2, 3, 4
"""Exit codes: drained; the configuration is wrong, or a file that it names is missing; a port or the jobs' database
is not available; a second signal ended it at once."""

EXAMPLE = """\
example (sidecar.yaml):
  listen: 0.0.0.0:8080
  upstream: {url: http://127.0.0.1:9000}
  policy:
    slo: {latency: {p99: 50ms}}

From an environment variable, as in a pod: carpool-sidecar --config-env CARPOOL_CONFIG. With `publicKey` and `target`
in it, changes signed by an operator are taken from `PUT /v1/config` on the admin port and from the directory `changes`.
Fields that this version does not know are ignored there, and reported in the log: an injector may be newer. In files,
and with --check, they are errors.

The file is watched: a new version takes effect within seconds, an invalid one changes nothing and is reported in the
log, in /v1/config on the admin port and in the metric carpool_config_rejected_total.

signals: SIGTERM and SIGINT drain:
  1. It reports unready at once, and still accepts requests for shutdown.lame.
  2. It finishes the requests that it has. Those still open after shutdown.limit are cut off.
  A second signal ends the process at once.

exit codes: 0 drained, 2 wrong configuration or a missing file, 3 a port or the jobs' database is not available, 4 ended
by a second signal.
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="carpool-sidecar",
        description="Merges inference requests into batches for the model server beside it, within an SLO.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--config", type=Path, metavar="FILE", help="configuration, YAML or JSON")
    source.add_argument(
        "--config-env", metavar="NAME", help="configuration (YAML or JSON) in this environment variable"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="only check the configuration and that the files it names are there: print OK and exit 0, else exit 2",
    )
    parser.add_argument(
        "--listen", type=_address, metavar="HOST:PORT", help="data port, instead of the file's `listen`"
    )
    parser.add_argument("--admin", type=_address, metavar="HOST:PORT", help="admin port, instead of the file's `admin`")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    options, rest = parser.parse_known_args(arguments)
    if rest:
        fix = "" if rest[0].startswith("-") else f"; a configuration is named by --config {rest[0]}"
        parser.error(f"unrecognized arguments: {' '.join(rest)}{fix}")
    if options.config is None and options.config_env is None:  # only now, so that a misspelt option is named first
        parser.error("name a configuration: --config FILE or --config-env NAME")
    where = options.config or f"${options.config_env}"
    try:
        text = from_environment(options.config_env) if options.config is None else load(options.config)
        if options.check:
            check(parse(text), listen=options.listen, admin=options.admin)
            sys.stdout.write(f"{where}: OK\n")
            return OK
        config, ignored = parse_injected(text) if options.config is None else (parse(text), ())
        return run(config, options.config, listen=options.listen, admin=options.admin, ignored=ignored)
    except PolicyError as error:
        sys.stderr.write(f"{where}: {error}\n")
        return WRONG_CONFIG
    except OSError as error:
        text = str(error) if error.filename is None else f"{error.filename}: {error.strerror}"
        sys.stderr.write(f"carpool-sidecar: {text}\n")
        return CANNOT_START


class _Version(argparse.Action):
    """Prints the version; the module for that is only imported here."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version  # noqa: PLC0415 - 2 MiB that serving does without

        sys.stdout.write(f"{parser.prog} {version('carpool-serving')}\n")
        parser.exit()


def _address(text: str) -> str:
    if not is_address(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not host:port: write e.g. 127.0.0.1:8080")
    return text


def load(path: Path) -> str:
    """Read a file.

    Raises ``PolicyError`` saying why it can't be read.
    """
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise PolicyError("config", f"{error.strerror}: name a file with --config") from None
    except UnicodeDecodeError as error:
        raise PolicyError("config", not_utf8(error)) from None


def from_environment(name: str) -> str:
    """Return the value of an environment variable.

    Raises ``PolicyError`` if it is not set.
    """
    text = os.environ.get(name)
    if text is None:
        raise PolicyError("config", "there is no such environment variable: set it to a configuration, JSON or YAML")
    return text


def run(
    config: SidecarConfig,
    path: Path | None = None,
    *,
    listen: str | None = None,
    admin: str | None = None,
    ignored: Sequence[str] = (),
) -> NoReturn:
    """Serve until a signal, then end the process with its exit code.

    ``path``: the file to watch. ``ignored``: fields of the configuration that this version does not know. It sets up
    the logs and handles signals, so it needs its own process. Inside another program, use ``Sidecar``. Raises
    ``PolicyError`` or ``OSError`` if it can't start.
    """
    import uvloop  # noqa: PLC0415 - so that the configuration can be checked where it is not installed

    key = _key(config)
    set_up(config.log)
    if ignored:
        logging.getLogger("carpool").error(
            "fields of the configuration are ignored: they are mistyped, or newer than this sidecar",
            extra={"fields": ", ".join(ignored)},
        )
    raise_limit()
    uvloop.run(_serve(config, path, key, listen=listen, admin=admin))


def check(config: SidecarConfig, *, listen: str | None = None, admin: str | None = None) -> None:
    """Check fixed waits, files, addresses and packages of a configuration; ``listen`` and ``admin`` replace the file's.

    Raises ``PolicyError`` naming the field.
    """
    config.validate_waits()
    _key(config)
    own_address.refuse(config.upstream, listen or config.listen, admin or config.admin)
    if config.public_key is not None:
        Authority(config.public_key, config.target)
    if config.onnx is not None:
        onnx_backend().check(config.onnx)
    if config.llm is not None:
        process.check(config.llm)
    if config.jobs is not None:
        credential(config.jobs)
        if why := unusable(config.jobs.path):
            raise PolicyError("jobs.path", why)


def _key(config: SidecarConfig) -> str | None:
    if config.api_key_file is None:
        return None
    try:
        key = Path(config.api_key_file).read_text("utf-8").strip()
    except OSError as error:
        why = str(error.strerror)
    except UnicodeDecodeError:
        why = "not UTF-8"
    else:
        if key.isprintable() and key:
            return key
        why = "not one line of text" if key else "empty"
    raise PolicyError("apiKeyFile", f"{config.api_key_file!r}: {why}: name a file that holds the admin key")


async def _serve(
    config: SidecarConfig, path: Path | None, key: str | None, *, listen: str | None, admin: str | None
) -> NoReturn:
    sidecar = Sidecar(config, path, key, listen=listen, admin=admin)
    stopping, now = asyncio.Event(), asyncio.Event()

    def stop() -> None:
        (now if stopping.is_set() else stopping).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        await sidecar.start()
        # Modules and settings stay: no collection looks at them again. A full one stopped all requests for 3 to 10 ms.
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000, *gc.get_threshold()[1:])
        outlived = loop.create_task(sidecar.shutdown.outlived.wait())
        outlived.add_done_callback(lambda _: stopping.set())
        broken = None if sidecar.engine is None else sidecar.engine.broken
        if broken is not None:
            broken.add_done_callback(lambda _: stopping.set())
        await stopping.wait()
        if broken is not None and broken.done():
            raise PolicyError("llm.path", broken.result())
        drained = loop.create_task(sidecar.drain())
        forced = loop.create_task(now.wait())
        await asyncio.wait({drained, forced}, return_when=asyncio.FIRST_COMPLETED)
        forced.cancel()
        code = OK if drained.done() else CUT_SHORT
        if code:
            logging.getLogger("carpool").warning("ended by a second signal")
    finally:
        await sidecar.close()
    # Python's normal exit waits for every thread, and one that computes may never end.
    logging.shutdown()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
