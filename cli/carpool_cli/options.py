"""Options of several commands, the types of options (durations, servers), and imports that may be missing."""

from __future__ import annotations

import importlib
import math
import os
import re
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from urllib.parse import quote, unquote, urlsplit

import click
from click.core import ParameterSource

from carpool.policy.durations import Duration, format_seconds
from carpool.policy.spec import Objective

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from carpool_sidecar.http1.messages import Headers


Decorator: TypeAlias = "Callable[[Callable[..., Any]], Callable[..., Any]]"

PICTURES = (".png", ".svg", ".pdf")

PATH = "/:@!$&'()*+,;="
"""Characters that a URL's path may have as they are, beside letters, digits and ``-._~``."""


def in_path(model: str) -> str:
    """Return a model's name as a URL's path has it, percent-encoded; the name may be that already."""
    return quote(unquote(model), safe=PATH)


class DurationType(click.ParamType[float]):
    """Seconds, written with their unit. ``above``: an exclusive lower limit in seconds; ``None``: 0 is allowed."""

    name = "duration"

    def __init__(self, above: float | None = None) -> None:
        self._above = above

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401 - click's signature
        """Read ``50ms``, or ``7.433ms`` as printed; a default that is already a number stays."""
        if isinstance(value, int | float):
            return float(value)
        try:
            seconds = self._read(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if self._above is not None and seconds <= self._above:
            self.fail(f"{value!r}: has to be longer than {format_seconds(self._above)}", param, ctx)
        return seconds

    @staticmethod
    def _read(text: str) -> float:
        """Return the seconds of a text.

        Raises ``ValueError`` with the expected format.
        """
        if found := re.fullmatch(r"([0-9]{1,5}\.[0-9]{1,6})(h|m|s|ms|us)", text):
            return float(found[1]) * float(Duration.parse(f"1{found[2]}"))
        return float(Duration.parse(text))


class PercentType(click.ParamType[int]):
    """A whole number from 1 to 100; a percent sign may stand behind it."""

    name = "percent"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ANN401 - click's signature
        """Read ``60`` or ``60%``."""
        found = re.fullmatch(r"([0-9]{1,3})%?", str(value))
        if found is None or not 1 <= int(found[1]) <= 100:
            self.fail(f"{value!r}: write a whole number from 1 to 100, e.g. 60", param, ctx)
        return int(found[1])


class AgoType(click.ParamType[float]):
    """Seconds, written as hours, days or weeks."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401 - click's signature
        """Read ``90s``, ``30m``, ``12h``, ``7d`` or ``2w``; a default that is already a number stays."""
        if isinstance(value, int | float):
            return float(value)
        found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)([smhdw])", value)
        if found is None or not float(found[1]):
            self.fail(f"{value!r} is no time: write e.g. 12h or 7d", param, ctx)
        return float(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}[found[2]]


class Address(NamedTuple):
    """A server: ``path`` precedes its endpoints' paths, and is mostly empty."""

    host: str
    port: int
    path: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}{self.path}"


class AddressType(click.ParamType[Address]):
    """The base URL of a server."""

    name = "url"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Address:  # noqa: ANN401 - click's signature
        """Read ``http://127.0.0.1:8000``, ``127.0.0.1:8000``, or ``:8000`` on this machine."""
        host = f"127.0.0.1{value}" if value.startswith(":") else value
        try:
            url = urlsplit(host if "://" in host else f"http://{host}")
            port = url.port or 80
        except ValueError as error:
            self.fail(f"{value!r}: {error}: write e.g. http://127.0.0.1:8000 or http://[::1]:8000", param, ctx)
        if url.scheme == "https":
            self.fail(f"{value!r}: TLS is not supported; name the server's plain port, http://host:port", param, ctx)
        if url.scheme != "http" or not url.hostname or url.query or url.fragment:
            self.fail(
                f"{value!r} is not a server's base URL: write e.g. http://127.0.0.1:8000 (plain http)", param, ctx
            )
        # Servers refuse a path with spaces or letters outside ASCII; what is percent-encoded already stays as it is.
        return Address(url.hostname, port, quote(url.path.rstrip("/"), safe=PATH + "%"))


class ShapeType(click.ParamType[tuple[int, ...]]):
    """The shape of one row."""

    name = "shape"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:  # noqa: ANN401 - click's signature
        """Read ``3,224,224``."""
        try:
            shape = tuple(int(part) for part in value.split(",") if part)
        except ValueError:
            shape = (0,)
        if any(dim < 1 for dim in shape) or (value and not shape):
            self.fail(f"{value!r}: write the shape of one row, e.g. 16 or 3,224,224", param, ctx)
        return shape


class DimType(click.ParamType[tuple[str, int]]):
    """The size of a dimension that a model leaves open."""

    name = "name=size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:  # noqa: ANN401 - click's signature
        """Read ``sequence=128``."""
        name, _, size = value.partition("=")
        if not name or not re.fullmatch("0*[1-9][0-9]*", size):
            self.fail(f"{value!r}: write the dimension's name and size, e.g. sequence=128", param, ctx)
        return name, int(size)


class FiniteRange(click.FloatRange):
    """A finite number within bounds: click's ranges accept ``nan`` and ``inf``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401 - click's signature
        """Reject numbers that are not finite."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r}: write a number, e.g. 0.5 or 200", param, ctx)
        return number


class InputFile(click.Path):
    """A file to read; its reader reports a missing or invalid one."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)


class OutputFile(click.Path):
    """A file to write: its folder is checked at once, not when all the work is done."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:  # noqa: ANN401 - click's signature
        """Check the folder."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(f"{str(path.parent)!r} is no folder: make it first", param, ctx)
        if not os.access(path.parent, os.W_OK):
            self.fail(f"{str(path.parent)!r} can't be written to: name another folder", param, ctx)
        return path


class PictureFile(OutputFile):
    """A plot to write: its format is checked at once, too."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:  # noqa: ANN401 - click's signature
        """Check the folder and the extension."""
        path = super().convert(value, param, ctx)
        if path.suffix.lower() not in PICTURES:
            self.fail(f"{str(path)!r}: end it with {', '.join(PICTURES)}", param, ctx)
        return path


class WithStreams(click.Command):
    """A command that ``--generative`` replaces by another one, with its own options, from the module ``streams``."""

    def __init__(self, *args: Any, streams: str, **settings: Any) -> None:  # noqa: ANN401 - click's own
        super().__init__(*args, **settings)
        self._module = streams
        self.params.append(
            click.Option(
                ["--generative"],
                is_flag=True,
                expose_value=False,
                help="For token streams of an LLM server, with other options: --generative --help shows them.",
            )
        )

    @property
    def streams(self) -> click.Command:
        """The command for token streams."""
        command: click.Command = importlib.import_module(self._module).command
        return command

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,  # noqa: ANN401 - click's own
    ) -> click.Context:
        """Switch to the command for token streams, if requested."""
        if "--generative" not in args:
            return super().make_context(info_name, args, parent, **extra)
        rest = [each for each in args if each != "--generative"]
        return self.streams.make_context(f"{info_name} --generative", rest, parent, **extra)


AGO = AgoType()
DURATION = DurationType()
SOME_TIME = DurationType(above=0.0)
INPUT_FILE = InputFile()
OUTPUT_FILE = OutputFile()
PICTURE_FILE = PictureFile()
ADDRESS = AddressType()
SHAPE = ShapeType()
DIMS = DimType()


def is_typed(name: str) -> bool:
    """Return whether an option of the running command was given."""
    return click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT


def need(module: str, extra: str) -> ModuleType:
    """Import a module that belongs to an extra.

    Raises ``click.ClickException`` with the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise click.ClickException(f"this needs {module}: in Carpool's folder, pip install '.[{extra}]'") from None


def header_fields(_: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> Headers:
    """Parse ``name: value`` of a repeatable option."""
    fields = []
    for value in values:
        name, colon, content = (part.strip() for part in value.partition(":"))
        if not colon or not name or re.search(r"[\x00-\x08\x0a-\x1f\x7f]", content):
            raise click.BadParameter(f"{value!r}: write e.g. 'x-api-key: secret'", param=parameter)
        if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
            raise click.BadParameter(
                f"{value!r}: servers refuse the name {name!r}; it may have ASCII letters, digits and hyphens",
                param=parameter,
            )
        fields.append((name.encode(), content.encode()))
    return fields


def shared(*names: str, **settings: Any) -> Callable[..., Decorator]:  # noqa: ANN401 - click's own
    """Return an option of several commands; each may give settings of its own, such as a help text or a default."""
    return lambda **own: click.option(*names, **{**settings, **own})


def together(*options: Decorator) -> Decorator:
    """Return several options as one decorator, in the order of the help."""
    return lambda command: reduce(lambda decorated, option: option(decorated), reversed(options), command)


# A load
rate = shared("--rate", type=FiniteRange(0, min_open=True), help="Requests per second; rescales a --trace.")
cv = shared("--cv", type=FiniteRange(0.05, 20), default=1.0, show_default=True)
trace = shared("--trace", type=click.Path(path_type=Path))
rows = shared("--rows", type=click.IntRange(1, 65536), default=1, show_default=True)
seed = shared("--seed", type=int, default=0, show_default=True)
warm_up = shared("--warm-up", type=DURATION)

# A device and its model
profile = shared(
    "--profile", "path", type=click.Path(path_type=Path), help="Profile of the device (JSON), of `carpool profile`."
)
executors = shared(
    "--executors", type=click.IntRange(1, 256), help="Batches computed at once.  [default: the profile's]"
)
threads = shared(
    "--threads",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Threads of one ONNX run; 0: onnxruntime's choice.",
)
model = shared("--model", default="standin", show_default=True, help="Name of the model, with --upstream.")
shape = shared("--shape", type=SHAPE)
timeout = shared("--timeout", type=SOME_TIME)
header = shared(
    "--header", "headers", multiple=True, callback=header_fields, help="Header field to add, 'name: value'; repeatable."
)
upstream_header = partial(header, help="Header field to add, 'name: value', with --upstream; repeatable.")

# Parameters, their bounds, and the SLO
slo = shared("--slo-p99", "slo", type=SOME_TIME, help="p99 to meet, e.g. 50ms.")
max_batch = shared("--max-batch", type=click.IntRange(1, 65536))
max_wait = shared("--max-wait", type=DURATION)
max_in_flight = shared("--max-in-flight", type=click.IntRange(1, 65536))
objective = together(
    click.option(
        "--objective",
        type=click.Choice([each.value for each in Objective], case_sensitive=False),
        help="What to choose among the settings that meet the SLO: the lowest latency while the device has room "
        "(Balanced), the least device time (Efficiency), the lowest p99 (Latency).  [default: Balanced]",
    ),
    click.option(
        "--target-utilization",
        type=PercentType(),
        metavar="PERCENT",
        help="How busy the device may be before Balanced waits for larger batches.  [default: 60]",
    ),
)

# Results
gpu_hour = shared(
    "--gpu-hour", type=FiniteRange(0, min_open=True), help="Price of one replica's accelerator by the hour."
)
plot = shared("--plot", type=PICTURE_FILE)
report_file = shared("--out", type=OUTPUT_FILE, help="Write the whole report (JSON) to this file.")
as_json = shared("--json", "as_json", is_flag=True, help="Print everything as JSON.")

# Where from
admin_access = together(
    click.option("--key-file", type=click.Path(path_type=Path), help="File with the admin key."),
    click.option(
        "--workload",
        help="Workload with the injected sidecar, e.g. shop/Deployment/resnet; "
        "--key-file is then the operator's private key.",
    ),
)
manifests = shared(
    "-f", "--filename", "source", required=True, metavar="FILE",
    help="Manifests, YAML or JSON, any number of documents; - is the standard input.",
)  # fmt: skip


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """Return a command's words without the values of header fields, which may be credentials."""
    shown = [re.sub(r"^(--header=[^:]*):.*", r"\1: ...", each, flags=re.DOTALL) for each in arguments]
    for at, each in enumerate(shown[:-1]):
        if each == "--header":
            shown[at + 1] = shown[at + 1].partition(":")[0] + ": ..."
    return shown
