"""`carpool explain`: the last decisions of a running sidecar."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click
import msgspec
from msgspec import Struct

from carpool.batching.counters import FAILED, REJECTED
from carpool.exchange.report import NOT_FOUND, OTHER, Report, RolledBack
from carpool.policy.durations import format_seconds
from carpool_cli import options
from carpool_cli.live.admin_client import (
    AdminClient,
    AdminError,
    Explained,
    Explanation,
    LastBusy,
    Predicted,
    client_of,
)
from carpool_cli.live.figures import Figures, duration, figures_of, number, passed_on
from carpool_cli.live.jobs import jobs_line
from carpool_cli.live.streams import engine_line, learned_line, streamed
from carpool_cli.live.unbatched import message_of, not_batched, not_merged, too_large, too_slow
from carpool_cli.options import ADDRESS, DURATION, Address
from carpool_cli.printable import json_of, printable
from carpool_sidecar.protocols import route
from carpool_sidecar.tuning.decisions import KEPT

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path

SCARCE = 0.3
"""Utilization from which the tuner rejects early: the tuner's own constant, repeated here to avoid loading the
tuner."""
RARE = 0.01
"""Share of misses up to which a forecast meets a p99. The forecast's own p99 covers only answered requests."""

POLL = 1.0
"""Seconds between two polls of --follow: the tuner decides once a second."""


@click.command(
    epilog="""\b
Examples:
  carpool explain
  carpool explain http://127.0.0.1:9090 --last 5 --over 10s
  carpool explain --follow
"""
)
@click.argument("admin", type=ADDRESS, default="http://127.0.0.1:9090")
@click.option(
    "--last", type=click.IntRange(1, 1000), default=10, show_default=True,
    help=f"Number of decisions to show; the sidecar remembers {KEPT}.",
)  # fmt: skip
@click.option(
    "--over",
    type=DURATION,
    default=2.0,
    help="Observation time, to compare with the forecast; 0s: all since the start.  [default: 2s]",
)
@click.option("--follow", is_flag=True, help="Continue, and print decisions as they are made.")
@options.as_json(help="Print JSON; with --follow one object a line.")
@options.admin_access
def command(
    *, admin: Address, last: int, over: float, follow: bool, as_json: bool, key_file: Path | None, workload: str | None
) -> None:
    """Show what the sidecar with the admin port ADMIN (http://127.0.0.1:9090 by default) decided, when and why.

    Each decision has its forecast, the setting that the tuner aims at, and the reason why it is not there yet. The last
    lines compare the last forecast with measurements: those of now, or of the last busy minute if no requests come.
    """
    client = client_of(admin, key_file, workload)
    try:
        if follow:
            with suppress(KeyboardInterrupt):  # the usual end of --follow; for a single poll it is an error
                _follow(client, as_json)
            return
        before = client.report() if over else None
        if over:
            time.sleep(over)
        after, explanation = client.report(), client.explanation()
    except AdminError as error:
        raise click.ClickException(str(error)) from None
    observed = observe(before, after)
    # A repeated decision has the place of its first occurrence: with several models the order would differ.
    shown = sorted(explanation.decisions, key=lambda each: each.at)[-last:]
    if as_json:
        document = {
            "tuned": explanation.tuned,
            "decisions": shown,
            "observed": observed,
            "forwarded": passed_on(before, after, over or after.uptime_seconds),
            "tokenStreams": streamed(before, after, over or after.uptime_seconds),
            "lastBusy": {name: minute_of(each) for name, each in explanation.last_busy.items()},
        }
        click.echo(json_of(document))
        return
    lines = [*unready(after), *too_slow(after), *not_merged(after), *posted(after), *token_streams(after), *jobs(after)]
    for line in lines:
        click.echo(printable(line))
    if not explanation.tuned:
        click.echo("nothing is tuned here: parameters are fixed, or the mode is Hold")
    for gone in after.rolled_back:
        click.echo(printable(taken_back(gone)))
    if not shown and not after.token_streams.models:
        click.echo("no decision yet: no request that could be batched has come")
    for each in shown:
        click.echo(text_of(each, after.slo_seconds, not_batched(after)))
    lines = list(compared(explanation, observed, time.time()))
    if not lines and not after.token_streams.models:
        lines = [] if posted(after) else ["no request has come yet"]
    for line in ["", *lines] if lines else []:
        click.echo(printable(line))


def observe(before: Report | None, after: Report) -> dict[str, Figures]:
    """Return each model's figures between two polls; without the first, since the start."""
    stats = after.stats if before is None else after.stats.since(before.stats)
    seconds = after.uptime_seconds if before is None else after.stats.at - before.stats.at
    return {
        name: figures_of([model], seconds)
        for name, model in stats.models.items()
        if model.arrivals or model.served or any(model.misses.values())
    }


def unready(report: Report) -> list[str]:
    """Return a line with the reason while the sidecar is not ready: the decisions know nothing of it."""
    return [] if report.ready else [f"not ready: {report.readiness}"]


def taken_back(rolled_back: RolledBack) -> str:
    """Return a rollback as a line for users."""
    return (
        f"{rolled_back.model or 'model'}  taken back: {rolled_back.rejected.describe()} (generation "
        f"{rolled_back.generation}) to {rolled_back.back_to.describe()}: {rolled_back.reason}"
    )


def posted(report: Report) -> list[str]:
    """Return a line for each path with POST requests that were passed on, since the start."""
    lines = []
    for each in passed_on(None, report, report.uptime_seconds):
        count = f"{number(each.requests)} request{'' if each.requests == 1 else 's'}"
        if each.name == f"POST {NOT_FOUND}":
            lines.append(f"{count} to paths that the server does not have (404 or 405): not batched; check the path")
        elif each.name.startswith("POST ") or each.name == OTHER:
            endpoint = route(each.name.removeprefix("POST ").encode("latin-1"))
            why = (
                "not a path of V1 or V2 (docs/protocols.md)" if endpoint is None else too_large(report, endpoint.model)
            )
            lines.append(
                f"{each.name}: {count}, p99 {duration(each.p99)}, {each.good_share:.2%} good within the SLO; "
                f"not batched: {why}"
            )
    return lines


def token_streams(report: Report) -> list[str]:
    """Return lines about the token streams since the start, if there were any."""
    engine = engine_line(report.token_streams)
    if not engine:
        return []
    models = [str(each) for each in streamed(None, report, report.uptime_seconds)]
    lines = [f"token streams: {engine}", *models, learned_line(report.token_streams)]
    return [line for line in lines if line]


def jobs(report: Report) -> list[str]:
    """Return a line about jobs, if they are on."""
    line = jobs_line(report.jobs)
    return [f"jobs: {line}"] if line else []


def text_of(each: Explained, slo: float, unbatched: Collection[str] = ()) -> str:
    """Return a decision as lines for users.

    ``slo``: seconds of the p99 target. ``unbatched``: models whose requests are never batched.
    """
    decision = each.decision
    when = datetime.fromtimestamp(each.at, UTC).astimezone().strftime("%H:%M:%S")
    again = f" ({each.times} times in a row)" if each.times > 1 else ""
    verb = "changed" if decision.change else "kept"
    state = f"[{decision.state}] " if decision.state else ""
    message = message_of(each, unbatched)
    lines = [f"{when}  {each.model or 'model'}  {state}{verb}, {decision.reason}{again}: {message}"]
    if decision.predicted is not None:
        predicted = decision.predicted
        lines.append(
            f"          at {number(decision.rate)}/s: p99 {duration(predicted.p99)}, {duration(predicted.p99_ahead)} "
            f"at 1.25x, {predicted.miss_fraction:.2%} late or refused; {duration(predicted.device_time)} device time "
            f"per request, {predicted.mean_batch:.3g} rows per batch"
        )
        if predicted.utilization:
            target = f" (target {decision.target_utilization:.0%})" if decision.target_utilization else ""
            other = f"; {decision.alternative}" if decision.alternative else ""
            lines.append(f"          device {predicted.utilization:.0%} busy{target}{other}")
    if (better := decision.recommended) is not None:
        lines.append(
            f"          recommended: p99 {duration(better.p99)}, {duration(better.p99_ahead)} at 1.25x, "
            f"{better.miss_fraction:.2%} late or refused; device {better.utilization:.0%} busy"
        )
    if decision.capped_by and decision.uncapped is not None:
        lines.append(f"          would be {decision.uncapped.describe()}; limited by: {decision.capped_by}")
    if decision.shed_slo:
        lines.append(
            "          requests that others would make late for the SLO are refused early: "
            + _why_early(decision.predicted, slo)
        )
    return "\n".join(map(printable, lines))


def _why_early(forecast: Predicted | None, slo: float) -> str:
    """Return why requests are rejected early (docs/admission.md), as far as a forecast shows it."""
    if forecast is None:
        return "as when the last requests came; without requests nothing is forecast"
    if forecast.p99 is None or forecast.p99 > slo or forecast.miss_fraction > RARE:
        return "the forecast misses it"
    if forecast.utilization > SCARCE:
        return f"device time is scarce, more than {SCARCE:.0%} busy"
    if forecast.p99_ahead is None or forecast.p99_ahead > slo:
        return "device time is scarce, without room for 1.25x the load"
    return "more requests wait than can be answered in time, or the policy's shedAt is SLO"


class Minute(Struct, frozen=True):
    """A model's last minute with requests. ``at``: its end, seconds since the epoch."""

    at: float
    observed: Figures
    predicted: Predicted | None


def minute_of(busy: LastBusy) -> Minute:
    """Return the figures of a last busy minute."""
    return Minute(busy.at, figures_of([busy.stats], busy.seconds), busy.predicted)


def compared(explanation: Explanation, observed: dict[str, Figures], now: float) -> Iterable[str]:
    """Compare the last prediction for each model with the observed figures, or those of its last busy minute.

    ``now`` in seconds since the epoch.
    """
    rows: list[tuple[str, Figures, Predicted | None]] = []
    for name, found in observed.items():
        last = next((each for each in reversed(explanation.decisions) if each.model == name), None)
        predicted = last.decision.predicted if last is not None else None
        rows.append((f"{name or 'model'}, observed over {duration(found.seconds)} (predicted):", found, predicted))
    for name, each in explanation.last_busy.items():
        if name not in observed:
            minute = minute_of(each)
            ago = format_seconds(max(round(now - minute.at), 0))
            over = duration(minute.observed.seconds)
            title = f"{name or 'model'}, no request for {ago}; its last busy minute, observed over {over} (predicted):"
            rows.append((title, minute.observed, minute.predicted))
    for title, found, predicted in rows:
        yield title
        is_so = _lines(found.p50, found.p99, found.goodput, found.miss_share, found.mean_batch)
        if predicted is None:
            was_said = ["nothing"] * len(is_so)
        else:
            was_said = _lines(
                predicted.p50, predicted.p99, predicted.goodput, predicted.miss_fraction, predicted.mean_batch
            )
        for label, left, right in zip(COMPARED, is_so, was_said, strict=True):
            yield f"  {label:13} {left:>9}  ({right})"
        if count := found.misses.get(FAILED):
            yield (
                f"  {number(count)} failed, by the model or on the way to it: carpool_requests_total has the codes, "
                "the model's log the reasons"
            )
        if count := found.misses.get(REJECTED):
            yield f"  {number(count)} rejected (4xx), which are no misses: carpool_requests_total has the codes"


COMPARED = ("p50", "p99", "goodput", "misses", "rows per batch")


def _lines(
    p50: float | None, p99: float | None, goodput: float, miss_share: float | None, mean_batch: float | None
) -> list[str]:
    """Format the comparison."""
    return [
        duration(p50),
        duration(p99),
        f"{number(goodput)}/s",
        "-" if miss_share is None else f"{miss_share:.2%}",
        "-" if mean_batch is None else f"{mean_batch:.3g}",
    ]


def new_decisions(explanation: Explanation, shown: dict[str, Explained]) -> list[Explained]:
    """Return the decisions not shown yet, and add them to ``shown``, the last one by model.

    A decision that repeats with the same reason is shown once.
    """
    found = []
    for each in explanation.decisions:
        last = shown.get(each.model)
        if last is not None:
            if each.at <= last.at:
                continue
            same = not each.decision.change and not last.decision.change
            if same and each.decision.reason == last.decision.reason:
                shown[each.model] = each
                continue
        shown[each.model] = each
        found.append(each)
    return found


def _follow(client: AdminClient, as_json: bool) -> None:
    shown: dict[str, Explained] = {}
    while True:
        report = client.report()
        for each in new_decisions(client.explanation(), shown):
            said = text_of(each, report.slo_seconds, not_batched(report))
            click.echo(msgspec.json.encode(each, enc_hook=str).decode() if as_json else said)
        time.sleep(POLL)
