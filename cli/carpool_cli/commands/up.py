"""`carpool up`: a sidecar with its tuner, and a live view of it."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
import yaml

from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.policy.plain import PolicyError, from_plain, to_plain
from carpool.policy.spec import Axis
from carpool_cli import options
from carpool_cli.commands.top import watch
from carpool_cli.live.admin_client import AdminClient, AdminError, key_of
from carpool_cli.live.first_call import curl_line
from carpool_cli.live.launch import Child, LaunchError, event_of, explained, readable
from carpool_cli.options import SOME_TIME, Address
from carpool_cli.printable import printable
from carpool_sidecar.admin.health import UNASKED
from carpool_sidecar.config import own_address
from carpool_sidecar.config.hints import not_utf8
from carpool_sidecar.config.settings import SidecarConfig, address_of, read

if TYPE_CHECKING:
    from collections.abc import Callable

DATA = "127.0.0.1:8080"
"""Default address for requests."""

ASKED = 3.0
"""Seconds that the first request to the model may delay the printed endpoints."""

KINDS = ("upstream", "onnx", "llm")
"""Kinds of upstream: exactly one is given."""

NOTES = 3
"""Lines of the log below the live view."""

DECISION = "parameters changed"
"""The log event of a tuner's decision."""


def _axes(_: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, Axis]:
    found = {}
    for value in values:
        model, _equals, axis = value.rpartition("=")
        known = {each.value.lower(): each for each in Axis}
        if not model or axis.lower() not in known:
            raise click.BadParameter(f"{value!r}: write MODEL=Auto, MODEL=First or MODEL=None", param=parameter)
        found[model] = known[axis.lower()]
    return found


def _settings(_: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> list[tuple[str, object]]:
    found = []
    for value in values:
        path, equals, text = value.partition("=")
        try:
            plain = yaml.safe_load(text)
            msgspec.json.encode(plain)
        except yaml.YAMLError:
            plain = text
        except RecursionError:
            raise click.BadParameter(
                f"{value[:80]!r}: the value contains itself, or is nested too deeply", param=parameter
            ) from None
        if not path or not equals:
            raise click.BadParameter(
                f"{value!r}: write a field's path and value, e.g. policy.tuning.mode=Hold", param=parameter
            )
        found.append((path, plain))
    return found


@click.command(
    epilog="""\b
Examples:
  carpool up --model model.onnx --slo-p99 50ms
  carpool up --model model.gguf --slo-ttft-p99 2s --slo-tpot-p99 50ms
  carpool up --upstream http://127.0.0.1:9000 --slo-p99 50ms --port 8080 --axis resnet=First
  carpool up --upstream http://127.0.0.1:9000 --slo-p99 50ms --fixed --max-batch 16 --max-wait 2ms
  carpool up --upstream http://127.0.0.1:8000 --slo-ttft-p99 2s --slo-tpot-p99 50ms
  carpool up --config sidecar.yaml --set policy.tuning.mode=Recommend

Ctrl-C drains: no new connections, all accepted requests are answered. A second one ends it at once.
"""
)
@click.option("--onnx", type=click.Path(path_type=Path), help="ONNX file to serve in the sidecar itself.")
@click.option(
    "--model",
    help="File to serve: .onnx in the sidecar, .gguf (or a folder of OpenVINO) by an engine beside it. With --onnx: "
    "the model's name.  [default: the file's]",
)
@click.option("--upstream", help="Model server behind it: http://host:port or unix:/path.")
@options.slo()
@click.option(
    "--slo-ttft-p99", "ttft", type=SOME_TIME, help="Token streams: p99 of the time to the first token, e.g. 2s."
)
@click.option(
    "--slo-tpot-p99", "tpot", type=SOME_TIME, help="Token streams: p99 of the time per further token, e.g. 50ms."
)
@click.option(
    "--config", type=click.Path(path_type=Path), help="Configuration file; watched, unless options override it."
)
@click.option("--host", help="Address of the data port; 0.0.0.0: reachable from elsewhere.  [default: 127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help="Data port; 0: any free one.  [default: 8080]")
@click.option("--admin-port", type=click.IntRange(0, 65535), help="Admin port, on loopback.  [default: 9090]")
@click.option(
    "--axis",
    "axes",
    multiple=True,
    callback=_axes,
    help="MODEL=First: dim 0 is the batch; MODEL=None: never merge. Repeatable.  [default: ask the model]",
)
@options.objective
@options.max_batch(help="Rows at most; with --fixed: the batch.")
@options.max_wait(help="Wait at most; with --fixed: the wait.")
@options.max_in_flight(help="Batches sent at once at most.")
@click.option("--fixed", is_flag=True, help="Tune nothing: use --max-batch, --max-wait and --max-in-flight as given.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    callback=_settings,
    help="Any field of the configuration: PATH=VALUE, e.g. policy.admission.timeout=2s. Repeatable.",
)
@click.option("--plain", is_flag=True, help="No live view: logs, as without a terminal.")
@click.pass_context
def command(context: click.Context, /, **asked: Any) -> None:  # noqa: ANN401 - the options above, by name
    """Serve a model, merge its requests into batches, and tune the batching to a p99.

    Prints the endpoints and a line to try. On a terminal it then shows a live view; elsewhere logs go to stderr, one
    JSON object a line.

    Exits 0 when drained, 2 for a wrong configuration or a missing file, 3 when a port or the jobs' database is not
    available, 4 after a second Ctrl-C.
    """
    try:
        plain, watched = _plain(asked)
        config = from_plain(plain, SidecarConfig, what="config").validate()
        own_address.refuse(config.upstream, config.listen, config.admin)
    except PolicyError as error:
        file = "" if asked["config"] is None else f"{asked['config']}: "
        raise click.UsageError(f"{file}{hint(str(error))}") from None
    served = config.onnx or config.llm
    if served is not None and (others := [name for name in asked["axes"] if name != served.model]):
        raise click.UsageError(f"--axis {others[0]}: the model that is served here is {served.model}")
    key = key_of(None if config.api_key_file is None else Path(config.api_key_file))
    with tempfile.TemporaryDirectory(prefix="carpool-") as folder:
        path = watched
        if path is None:
            path = Path(folder) / "sidecar.json"
            path.write_bytes(msgspec.json.encode(plain))
        if asked["config"] is not None and watched is None:
            click.echo(f"{asked['config']} is not watched: options override it")
        ports = {address_of(config.listen)[1]: "--port", address_of(config.admin)[1]: "--admin-port"}
        arguments = ["--config", str(path), "--listen", config.listen, "--admin", config.admin]
        context.exit(_serve(config, key, arguments, path, ports, plain=asked["plain"]))


def _plain(asked: dict[str, Any]) -> tuple[dict[str, Any], Path | None]:
    """Return the configuration as plain data, and the file to watch if it contains everything.

    Raises ``click.UsageError`` if options contradict each other.
    """
    plain = _base(asked)
    # Ports, which are passed separately from a watched file
    if asked["host"] is not None or asked["port"] is not None:
        host, _, port = plain["listen"].rpartition(":")
        host = host if asked["host"] is None else asked["host"]
        plain["listen"] = f"{host}:{port if asked['port'] is None else asked['port']}"
    if asked["admin_port"] is not None:
        plain["admin"] = f"127.0.0.1:{asked['admin_port']}"
    before = msgspec.json.encode(plain)
    _set_upstream(plain, asked)
    _set_policy(plain, asked)
    for dotted, value in asked["settings"]:
        _put(plain, dotted, value)
    return plain, asked["config"] if msgspec.json.encode(plain) == before else None


def _base(asked: dict[str, Any]) -> dict[str, Any]:
    """Return what the options change: the content of a file, or the defaults for an SLO.

    Raises ``click.UsageError``.
    """
    file: Path | None = asked["config"]
    if file is not None:
        try:
            ground = read(file.read_text("utf-8"))
        except OSError as error:
            raise click.UsageError(f"{file}: {error.strerror}: name a file with --config") from None
        except UnicodeDecodeError as error:
            raise click.UsageError(f"{file}: {not_utf8(error)}") from None
        except PolicyError as error:
            raise click.UsageError(f"{file}: {error}") from None
        return {**to_plain(ground), "listen": ground.listen}
    if asked["slo"] is None and asked["ttft"] is None:
        raise click.UsageError(
            "give the p99 to meet: --slo-p99 50ms; for a language model --slo-ttft-p99 2s --slo-tpot-p99 50ms; "
            "or a --config file"
        )
    # No load balancer has to notice the shutdown, so there is nothing to wait for.
    return {"policy": {}, "listen": DATA, "shutdown": {"lame": "0s"}}


def _set_upstream(plain: dict[str, Any], asked: dict[str, Any]) -> None:
    """Set the upstream, or the file to serve.

    Raises ``click.UsageError`` if there is none, or more than one.
    """
    if asked["onnx"] is not None and asked["upstream"] is not None:
        raise click.UsageError("name --onnx or --upstream, one of the two")
    for kind, field in (("onnx", "path"), ("upstream", "url")):
        if asked[kind] is not None:
            _only(plain, kind)
            plain[kind] = {**plain.get(kind, {}), field: str(asked[kind])}
    if asked["model"] is not None:
        _model(plain, asked["model"], asked["upstream"], named=asked["onnx"] is not None)
    if not any(plain.get(kind) for kind in KINDS):
        raise click.UsageError("name what to serve: --model FILE, or --upstream http://127.0.0.1:9000")


def _set_policy(plain: dict[str, Any], asked: dict[str, Any]) -> None:
    """Set the policy: the SLO, the objective, the axes, and the bounds or the fixed parameters."""
    policy = plain["policy"]
    targets = {
        name: {"p99": str(Duration(asked[option]))}
        for name, option in (("latency", "slo"), ("ttft", "ttft"), ("tpot", "tpot"))
        if asked[option] is not None
    }
    if targets:
        policy["slo"] = policy.get("slo", {}) | targets
    if asked["objective"] is not None:
        policy["objective"] = asked["objective"]
    if asked["target_utilization"] is not None:
        policy["targetUtilizationPercent"] = asked["target_utilization"]
    if asked["axes"]:
        models = {model["name"]: model for model in policy.get("models", ())}
        for name, axis in asked["axes"].items():
            models[name] = {**models.get(name, {"name": name}), "axis": str(axis)}
        policy["models"] = [*models.values()]
    turned = {
        "maxBatch": asked["max_batch"],
        "maxWait": None if asked["max_wait"] is None else str(Duration(asked["max_wait"])),
        "maxInFlight": asked["max_in_flight"],
    }
    given = {name: value for name, value in turned.items() if value is not None}
    if asked["fixed"]:
        plain["parameters"] = {"*": to_plain(Parameters()) | given}
    elif given:
        bounds = policy.setdefault("bounds", {})
        for name, value in given.items():
            bounds[name] = {**bounds.get(name, {}), "max": value}


def _only(plain: dict[str, Any], kind: str) -> None:
    """Remove fields that an option replaces."""
    for other in KINDS:
        if other != kind:
            plain.pop(other, None)


def _model(plain: dict[str, Any], model: str, upstream: str | None, *, named: bool) -> None:
    """Set the file to serve; with ``named``, also its name.

    Raises ``click.UsageError`` for an invalid path.
    """
    file = model.endswith((".onnx", ".gguf")) or Path(model).is_dir()
    if named or (not file and plain.get("onnx")):
        plain["onnx"]["name"] = model
    elif upstream is not None:
        raise click.UsageError("--model is a file to serve: a server behind --upstream names its models itself")
    elif not file:
        raise click.UsageError(f"--model {model}: name a .onnx or .gguf file, or a folder of an OpenVINO model")
    else:
        kind = "onnx" if model.endswith(".onnx") else "llm"
        _only(plain, kind)
        plain[kind] = {**(plain.get(kind) or {}), "path": model}


def _put(plain: dict[str, Any], dotted: str, value: object) -> None:
    """Set one field by its path.

    Raises ``click.UsageError`` if a parent holds no fields.
    """
    *way, last = dotted.split(".")
    inside: Any = plain
    for name in way:
        inside = inside.setdefault(name, {})
        if not isinstance(inside, dict):
            raise click.UsageError(f"--set {dotted}: {name} holds no fields of its own; set it whole, as YAML")
    inside[last] = value


OPTIONS = {
    "policy.slo.latency": "--slo-p99",
    "policy.slo.ttft": "--slo-ttft-p99",
    "policy.slo.ttft.p99": "--slo-ttft-p99",
    "policy.slo.tpot.p99": "--slo-tpot-p99",
    "policy.targetUtilizationPercent": "--target-utilization",
    "policy.bounds.maxWait.max": "--max-wait",
    "upstream.url": "--upstream",
    "onnx.name": "--model",
    "onnx.path": "--model or --onnx",
    "llm.path": "--model",
}
"""Options that set a field."""


def hint(error: str) -> str:
    """Return a field's error, with the option that sets it: ``upstream.url: ... (--upstream)``."""
    option = OPTIONS.get(error.partition(": ")[0])
    return f"{error} ({option})" if option is not None else error


def _serve(
    config: SidecarConfig,
    key: str | None,
    arguments: list[str],
    path: Path,
    ports: dict[int, str],
    *,
    plain: bool,
) -> int:
    """Run the sidecar to its end; return its exit code."""
    live = not plain and sys.stdout.isatty()
    asked = False

    def log(line: str) -> None:
        if not live:
            click.echo(readable(line) if sys.stderr.isatty() else line, err=True)

    def end() -> None:
        nonlocal asked
        while os.read(signals, 1):
            asked = True
            child.end()

    signals = _signals()
    child = Child(arguments, log)
    threading.Thread(target=end, daemon=True).start()
    try:
        child.wait_until_listening()
        return _attend(child, config, key, live=live, asked=lambda: asked)
    except LaunchError as error:
        if asked:
            return 0
        click.echo(f"Error: {hint(explained(str(error), path, ports))}", err=True)
        return error.code
    finally:
        # Whatever fails here, a closed pipe for example, the sidecar must end with this process.
        child.end()
        child.wait()


def _signals() -> int:
    """Return a file descriptor with a byte for each termination signal.

    A Python handler would run too late: one that is due just before ``waitpid`` doesn't interrupt it.
    """
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    signal.set_wakeup_fd(sink)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    return source


def _attend(child: Child, config: SidecarConfig, key: str | None, *, live: bool, asked: Callable[[], bool]) -> int:
    """Report on a listening sidecar until it ends; return its exit code."""
    server, admin = _reachable(child.data), _reachable(child.admin)
    client = AdminClient(admin, key)
    first = Hint(config, server, admin)
    for line in _endpoints(config, server, client, first):
        click.echo(line)
    if live:
        _watch(child, client, f"carpool {server} for {_served(config)}", first)
    code = child.wait()
    if code < 0:
        click.echo(f"Error: the sidecar was ended by {signal.Signals(-code).name}; start it again", err=True)
        return 128 - code
    if live:
        if code and not asked():
            for line in list(child.lines)[-NOTES:]:
                click.echo(readable(line), err=True)
        click.echo("drained: all requests were answered" if code == 0 else f"the sidecar ended with {code}")
    return code


def _watch(child: Child, client: AdminClient, title: str, first: Hint) -> None:
    def notes() -> list[str]:
        # The view itself shows decisions.
        lines = [line for line in list(child.lines) if event_of(line).get("event") != DECISION]
        return [readable(line) for line in lines[-NOTES:]]

    failed = False
    while child.runs:
        try:
            watch(client, title, hint=first, goes_on=lambda: child.runs, notes=notes)
        except AdminError:
            time.sleep(1.0)  # a paused host; the process shows whether the sidecar lives
        except OSError:
            raise  # the terminal is gone
        except Exception as error:  # noqa: BLE001 - requests matter more than their view
            if not failed:
                failed = True
                why = printable(f"{type(error).__name__}: {error}")
                click.echo(f"Error: the live view failed, and the sidecar serves on: {why}", err=True)
            time.sleep(1.0)


def _served(config: SidecarConfig) -> str:
    if config.onnx is not None:
        return f"{config.onnx.model} ({config.onnx.path})"
    if config.llm is not None:
        return f"{config.llm.model} ({config.llm.path})"
    assert config.upstream is not None  # noqa: S101 - for the type checker: validated
    return config.upstream.url


def _endpoints(config: SidecarConfig, server: Address, client: AdminClient, first: Hint) -> list[str]:
    """Return the text to print once it listens; waits a little for the model's first answer."""
    deadline = time.monotonic() + ASKED
    readiness, ready = UNASKED, False
    while readiness == UNASKED and time.monotonic() < deadline:
        try:
            report = client.report()
        except AdminError:
            break
        readiness, ready = report.readiness, report.ready
        time.sleep(0.05)
    lines = [
        f"serving {_served(config)}",
        f"  requests  {server}",
        f"  admin     {client.address}  (/metrics, /readyz; carpool explain {client.address})",
        f"  try       {first(ready)}",
    ]
    if not ready:
        why = readiness if config.llm is None else "its engine starts"
        lines.append(f"  waiting for {_served(config)}: {why}; requests get 503 until it is ready")
    return lines


class Hint:
    """A line to try: for inference once the model can describe its inputs, for its readiness before."""

    def __init__(self, config: SidecarConfig, server: Address, admin: Address) -> None:
        self._server = server
        self._admin = admin
        self._models = [model.name for model in config.policy.models]
        if config.onnx is not None:
            self._models.insert(0, config.onnx.model)
        self._found = ""
        if config.llm is not None:
            body = '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 40, "stream": true}'
            self._found = f"curl -N {server}/v1/chat/completions -d '{body}'"

    def __call__(self, ready: bool) -> str:
        """Return the line; the model is asked once, when it is ``ready``."""
        if ready and not self._found:
            self._found = curl_line(self._server, self._models) or self._readiness
        return self._found or self._readiness

    @property
    def _readiness(self) -> str:
        return f"curl -i {self._admin}/readyz"


def _reachable(listening: str) -> Address:
    """Return the address of a listener; for one on every address, loopback."""
    host, port = address_of(listening)
    return Address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port, "")  # noqa: S104 - read, not bound
