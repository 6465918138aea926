"""The ``carpool`` command: a group whose subcommands are modules, imported when they are called."""

from __future__ import annotations

import errno
import importlib
import os
from typing import TYPE_CHECKING, Any, NamedTuple

try:
    import click
except ModuleNotFoundError:
    # The script is installed without extras, too; a subcommand's dependencies come with its extra.
    raise SystemExit("carpool: the commands need the extra `cli`: in Carpool's folder, pip install '.[cli]'") from None

from carpool_cli.stopped import Interrupted

if TYPE_CHECKING:
    from collections.abc import Mapping


class Entry(NamedTuple):
    """The module of a subcommand (it has a ``command``), and its line in the group's help."""

    module: str
    summary: str


# The summaries are here so that `carpool --help` imports none of the modules: numpy alone costs 0.1 s.
COMMANDS = {
    "up": Entry("carpool_cli.commands.up", "Serve a model with batching that tunes itself to a p99."),
    "top": Entry("carpool_cli.commands.top", "Watch a running sidecar."),
    "explain": Entry("carpool_cli.commands.explain", "Show what a running sidecar decided, and why."),
    "profile": Entry("carpool_cli.commands.profile", "Measure batch latency, by batch size."),
    "bench": Entry("carpool_cli.commands.bench", "Measure a server under open-loop load."),
    "batch": Entry("carpool_cli.commands.batch", "Run a file of inputs through a model, offline and resumable."),
    "recommend": Entry(
        "carpool_cli.commands.recommend", "Choose parameters for a profile, a load and an SLO, with reasons."
    ),
    "simulate": Entry(
        "carpool_cli.commands.simulate", "Forecast the effect of a configuration or of the tuner, by simulation."
    ),
    "savings": Entry("carpool_cli.commands.savings", "Compare ways to batch: device time, replicas and money."),
    "inject": Entry("carpool_cli.commands.inject", "Put a sidecar into Kubernetes manifests."),
    "standin": Entry("carpool_cli.commands.standin", "Serve an echo that takes as long as a given accelerator."),
}


class Mistyped(click.ClickException):
    """Invalid input on the command line; one line."""

    exit_code = 2


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports each on demand."""

    def __init__(self, *args: Any, entries: Mapping[str, Entry] = COMMANDS, **settings: Any) -> None:  # noqa: ANN401 - click's own
        super().__init__(*args, **settings)
        self.entries = entries

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Names in the order of the table: the order in which they are used."""
        return list(self.entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        """Import a command."""
        entry = self.entries.get(cmd_name)
        if entry is None:
            return None
        command: click.Command = importlib.import_module(entry.module).command
        return command

    def invoke(self, ctx: click.Context) -> object:
        """Run a command. Usage errors are reported in one line, without the usage that click prints before it.

        Raises ``Mistyped`` then, and ``click.ClickException`` for a file that can't be read or written.
        """
        try:
            return super().invoke(ctx)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            path = ctx.command_path if error.ctx is None else error.ctx.command_path
            raise Mistyped(f"{error.format_message()} ({path} --help)") from None
        except KeyboardInterrupt:
            raise Interrupted("stopped") from None
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # the reader of a pipe has gone: click exits quietly
            where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
            raise click.ClickException(f"{where}{error.strerror or str(error) or type(error).__name__}") from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's signature
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in self.entries.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="carpool-serving", prog_name="carpool")
def main() -> None:
    """Batch requests to models, and tune the batching to a p99: requests share a batch on the GPU.

    Durations carry their unit (50ms, 2s, 1m30s). Every command has an example in its --help.
    """
