"""`carpool explain`: the last decisions of a running sidecar."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from msgspec import Struct

from carpool.policy import format_seconds
from carpool.statistics import combine
from carpool_cli.admin_client import AdminClient, AdminError, key_of
from carpool_cli.options import ADDRESS, DURATION, Address

if TYPE_CHECKING:
    from collections.abc import Iterable

    from carpool_cli.admin_client import Explained, Explanation, Snapshot

POLL = 1.0
"""Seconds between two questions of --follow: the tuner decides once a second."""


class Observed(Struct, frozen=True, rename="camel"):
    """What a model really does, over ``seconds``; ``None`` where nothing was answered."""

    seconds: float
    rate: float
    goodput: float
    p50: float | None
    p99: float | None
    miss_fraction: float
    mean_batch: float


@click.command(
    epilog="""\b
Examples:
  carpool explain
  carpool explain http://127.0.0.1:9090 --last 5 --over 10s
  carpool explain --follow
"""
)
@click.argument("admin", type=ADDRESS, default="http://127.0.0.1:9090")
@click.option("--last", type=click.IntRange(1, 1000), default=10, show_default=True, help="Decisions to show.")
@click.option(
    "--over",
    type=DURATION,
    default=2.0,
    help="Observe for so long, to compare with what was predicted; 0s: all since the start.  [default: 2s]",
)
@click.option("--follow", is_flag=True, help="Go on, and print decisions as they are taken.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; with --follow one object a line.")
@click.option("--key-file", type=click.Path(path_type=Path), help="File with the admin key.")
def command(*, admin: Address, last: int, over: float, follow: bool, as_json: bool, key_file: Path | None) -> None:
    """Say what the sidecar whose admin port is at ADMIN (http://127.0.0.1:9090 by default) decided, when and why.

    Each decision comes with what it predicted; where the tuner would be if it could go at once, and what keeps it. At
    the end, what the last decision predicted stands beside what is observed.
    """
    client = AdminClient(admin, key_of(key_file))
    try:
        if follow:
            _follow(client, as_json)
            return
        before = client.snapshot() if over else None
        if over:
            time.sleep(over)
        after, explanation = client.snapshot(), client.explanation()
    except AdminError as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        return
    observed = observe(before, after)
    shown = explanation.decisions[-last:]
    if as_json:
        document = {"tuned": explanation.tuned, "decisions": shown, "observed": observed}
        click.echo(msgspec.json.format(msgspec.json.encode(document, enc_hook=str), indent=1))
        return
    if not explanation.tuned:
        click.echo("nothing is tuned here: parameters are fixed, or the mode is Hold")
    if not shown:
        click.echo("no decision yet: the tuner has not seen a request")
    for each in shown:
        click.echo(text_of(each))
    click.echo()
    for line in compared(explanation, observed):
        click.echo(line)


def observe(before: Snapshot | None, after: Snapshot) -> dict[str, Observed]:
    """Return what each model did between two looks; without the first, since the start."""
    stats = after.stats if before is None else after.stats.since(before.stats)
    seconds = after.uptime_seconds if before is None else after.stats.at - before.stats.at
    found = {}
    for name, model in stats.models.items():
        if not model.arrivals and not model.served:
            continue
        total = combine([model])
        batches = sum(cell[4] for cell in total.cells)
        ended = total.hits + total.missed
        found[name] = Observed(
            seconds=seconds,
            rate=total.arrivals / seconds,
            goodput=total.hits / seconds,
            p50=total.quantile(0.5),
            p99=total.quantile(0.99),
            miss_fraction=total.missed / ended if ended else 0.0,
            mean_batch=sum(cell[1] * cell[4] for cell in total.cells) / batches if batches else 0.0,
        )
    return found


def text_of(each: Explained) -> str:
    """Return a decision as lines for people."""
    decision = each.decision
    when = datetime.fromtimestamp(each.at, UTC).astimezone().strftime("%H:%M:%S")
    again = f" ({each.times} times in a row)" if each.times > 1 else ""
    verb = "changed" if decision.change else "kept"
    lines = [f"{when}  {each.model or 'model'}  {verb}, {decision.reason}{again}: {decision.message}"]
    if decision.predicted is not None:
        predicted = decision.predicted
        lines.append(
            f"          at {decision.rate:.4g}/s: p99 {_seconds(predicted.p99)}, {_seconds(predicted.p99_ahead)} at "
            f"1.25x; {_seconds(predicted.device_time)} of device a request, {predicted.mean_batch:.3g} rows a batch"
        )
    if decision.capped_by and decision.uncapped is not None:
        lines.append(f"          would be {decision.uncapped.describe()}; kept from it by: {decision.capped_by}")
    if decision.shed_slo:
        lines.append("          nothing holds the SLO: who would be late is refused")
    return "\n".join(lines)


def compared(explanation: Explanation, observed: dict[str, Observed]) -> Iterable[str]:
    """Set the last prediction for each model beside what is observed."""
    for name, found in observed.items():
        last = next((each for each in reversed(explanation.decisions) if each.model == name), None)
        predicted = last.decision.predicted if last is not None else None
        yield f"{name or 'model'}, observed over {format_seconds(found.seconds)} (predicted):"
        rows = (
            ("p50", _seconds(found.p50), predicted and _seconds(predicted.p50)),
            ("p99", _seconds(found.p99), predicted and _seconds(predicted.p99)),
            ("goodput", f"{found.goodput:.4g}/s", predicted and f"{predicted.goodput:.4g}/s"),
            ("misses", f"{found.miss_fraction:.2%}", predicted and f"{predicted.miss_fraction:.2%}"),
            ("rows a batch", f"{found.mean_batch:.3g}", predicted and f"{predicted.mean_batch:.3g}"),
        )
        for label, is_so, was_said in rows:
            yield f"  {label:13} {is_so:>9}  ({was_said or 'nothing'})"
    if not observed:
        yield "no request came meanwhile: there is nothing to compare with"


def news(explanation: Explanation, told: dict[str, Explained]) -> list[Explained]:
    """Return the decisions not told yet, and note them in ``told``, the last one by model.

    One that is taken again and again with the same reason is told once.
    """
    found = []
    for each in explanation.decisions:
        last = told.get(each.model)
        if last is not None:
            if each.at <= last.at:
                continue
            same = not each.decision.change and not last.decision.change
            if same and each.decision.reason is last.decision.reason:
                told[each.model] = each
                continue
        told[each.model] = each
        found.append(each)
    return found


def _follow(client: AdminClient, as_json: bool) -> None:
    told: dict[str, Explained] = {}
    while True:
        for each in news(client.explanation(), told):
            click.echo(msgspec.json.encode(each, enc_hook=str).decode() if as_json else text_of(each))
        time.sleep(POLL)


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)
