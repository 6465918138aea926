"""`carpool explain`: the last decisions of a running sidecar."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click
import msgspec

from carpool_cli.live.admin_client import AdminError, client_of
from carpool_cli.live.figures import Figures, duration, figures_of, number
from carpool_cli.options import ADDRESS, DURATION, Address, opening

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from carpool.exchange.report import Report, RolledBack
    from carpool_cli.live.admin_client import AdminClient, Explained, Explanation

POLL = 1.0
"""Seconds between two questions of --follow: the tuner decides once a second."""


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
@opening
def command(
    *, admin: Address, last: int, over: float, follow: bool, as_json: bool, key_file: Path | None, workload: str | None
) -> None:
    """Say what the sidecar whose admin port is at ADMIN (http://127.0.0.1:9090 by default) decided, when and why.

    Each decision comes with what it predicted; where the tuner would be if it could go at once, and what keeps it. At
    the end, what the last decision predicted stands beside what is observed.
    """
    client = client_of(admin, key_file, workload)
    try:
        if follow:
            _follow(client, as_json)
            return
        before = client.report() if over else None
        if over:
            time.sleep(over)
        after, explanation = client.report(), client.explanation()
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
    for gone in after.rolled_back:
        click.echo(taken_back(gone))
    for line in not_merged(after):
        click.echo(line)
    if not shown:
        click.echo("no decision yet: the tuner has not seen a request")
    for each in shown:
        click.echo(text_of(each))
    click.echo()
    for line in compared(explanation, observed):
        click.echo(line)


def observe(before: Report | None, after: Report) -> dict[str, Figures]:
    """Return what each model did between two looks; without the first, since the start."""
    stats = after.stats if before is None else after.stats.since(before.stats)
    seconds = after.uptime_seconds if before is None else after.stats.at - before.stats.at
    return {
        name: figures_of([model], seconds) for name, model in stats.models.items() if model.arrivals or model.served
    }


def taken_back(rolled_back: RolledBack) -> str:
    """Return a roll-back as a line for people."""
    return (
        f"{rolled_back.model or 'model'}  taken back: {rolled_back.rejected.describe()} (generation "
        f"{rolled_back.generation}) to {rolled_back.back_to.describe()}: {rolled_back.reason}"
    )


def not_merged(report: Report) -> list[str]:
    """Return a line for each model whose batches were not verified, or were seen to give other answers."""
    return [
        f"{entry.name or 'model'}{f' version {entry.version}' if entry.version else ''}  "
        f"batches {entry.verified}: {entry.evidence}"
        for entry in report.models
        if entry.verified in {"unverified", "refuted", "contradicted"}
    ]


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
            f"          at {number(decision.rate)}/s: p99 {duration(predicted.p99)}, {duration(predicted.p99_ahead)} "
            f"at 1.25x; {duration(predicted.device_time)} of device a request, {predicted.mean_batch:.3g} rows a batch"
        )
    if decision.capped_by and decision.uncapped is not None:
        lines.append(f"          would be {decision.uncapped.describe()}; kept from it by: {decision.capped_by}")
    if decision.shed_slo:
        lines.append("          nothing holds the SLO: who would be late is refused")
    return "\n".join(lines)


def compared(explanation: Explanation, observed: dict[str, Figures]) -> Iterable[str]:
    """Set the last prediction for each model beside what is observed."""
    for name, found in observed.items():
        last = next((each for each in reversed(explanation.decisions) if each.model == name), None)
        predicted = last.decision.predicted if last is not None else None
        yield f"{name or 'model'}, observed over {duration(found.seconds)} (predicted):"
        is_so = _lines(found.p50, found.p99, found.goodput, found.miss_share, found.mean_batch)
        if predicted is None:
            was_said = ["nothing"] * len(is_so)
        else:
            was_said = _lines(
                predicted.p50, predicted.p99, predicted.goodput, predicted.miss_fraction, predicted.mean_batch
            )
        for label, left, right in zip(COMPARED, is_so, was_said, strict=True):
            yield f"  {label:13} {left:>9}  ({right})"
    if not observed:
        yield "no request came meanwhile: --over 0s compares with all since the start"


COMPARED = ("p50", "p99", "goodput", "misses", "rows a batch")


def _lines(
    p50: float | None, p99: float | None, goodput: float, miss_share: float | None, mean_batch: float | None
) -> list[str]:
    """Write what is compared."""
    return [
        duration(p50),
        duration(p99),
        f"{number(goodput)}/s",
        "-" if miss_share is None else f"{miss_share:.2%}",
        "-" if mean_batch is None else f"{mean_batch:.3g}",
    ]


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
