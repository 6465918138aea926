"""docs/proof.md, its figures and its pictures, written from the data files alone: missed goals come first."""

from __future__ import annotations

import difflib
import sys
import textwrap
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from evidence import limits

from proof import matrices, plots, rows, verdict
from proof.alone import FORECAST_ENOUGH, FORECAST_REQUESTS, FORECAST_RUNS
from proof.rows import CARPOOL
from proof.verdict import LIMITS, MEASURES, REASONS, UTILIZED, figures, median_share, savings, shortfalls, worst

if TYPE_CHECKING:
    from proof.rows import Proof
    from proof.verdict import Shortfall

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "proof.md"
IMAGES = PAGE.parent / "images"

RECORD = 1
"""Seed of the record: the page's, others are only compared with it."""

PICTURES = {
    "proof-shares.svg": plots.shares,
    "proof-misses.svg": plots.misses,
    "proof-device-time.svg": plots.device_time,
    "proof-timelines.svg": plots.timelines,
}

NOT_RUN = "`make proof` has not been run for the record yet."


def data_file(seed: int) -> Path:
    """Return where a seed's results are kept."""
    return RESULTS / ("proof.json" if seed == RECORD else f"proof-seed-{seed}.json")


def main(*, check: bool) -> int:
    """Write the page and its pictures, or with ``check`` say how they differ from the data; returns the exit code."""
    stale = False
    for path, text in made().items():
        before = path.read_text("utf-8") if path.exists() else ""
        if before == text:
            continue
        stale = True
        if check:
            lines = difflib.unified_diff(
                before.splitlines(),
                text.splitlines(),
                f"{path.name} as it is",
                f"{path.name} from the data",
                lineterm="",
            )
            print("\n".join(list(lines)[:40]))
        else:
            path.write_text(text, encoding="utf-8")
            print(f"written to {path}")
    if check and stale:
        print("docs/proof.md is not what the data say: python benchmarks/proof --report", file=sys.stderr)
    return int(check and stale)


def made() -> dict[Path, str]:
    """Return what each file should hold."""
    record = data_file(RECORD)
    if not record.exists():
        return {PAGE: f"# The proof\n\n{NOT_RUN}\n"}
    proof = rows.read(record)
    others = [rows.read(path) for path in sorted(RESULTS.glob("proof-seed-*.json"))]
    files = {IMAGES / name: draw(proof) for name, draw in PICTURES.items()}
    return {PAGE: page(proof, others), PAGE.with_name("proof-figures.md"): matrices.page(proof), **files}


def page(proof: Proof, others: list[Proof], bounds: Path = LIMITS, reasons: Path = REASONS) -> str:
    """Return the page: shortfalls, goals, contenders, scenarios, how it is measured."""
    parts = [
        _head(proof),
        _shortfalls(proof, others, bounds, reasons),
        _goals(proof, others, bounds),
        _contenders(proof),
        _scenarios(proof),
        _alone(proof),
        _method(proof),
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _head(proof: Proof) -> list[str]:
    machine, rivals = proof.machine, len(proof.contenders) - 1
    return [
        "# The proof: how close to the oracle, how far ahead of the rest",
        "",
        "Written by `make proof` from [its data](../benchmarks/results/proof.json); do not edit.",
        "",
        *_filled(
            f"Carpool knows nothing but a p99. It is compared in {len(proof.scenarios)} scenarios with {rivals} rules "
            "in common use, which know the true batch latency, and with an oracle, which also knows the load. Virtual "
            "time and seeded, so the figures are the same on every machine."
        ),
        "",
        *_filled(
            f"Commit {proof.commit}, {proof.date}; seed {proof.seed}, suite {proof.suite}; `{proof.command}`, "
            f"{proof.seconds / 60:.0f} minutes ({proof.cpu_seconds / 60:.0f} of CPU) on {machine.cores} cores of "
            f"{machine.cpu}, {machine.system}, Python {machine.python}"
            + (", Carpool's core compiled." if proof.compiled else ".")
            + (f" Results of {proof.kept} plays of oracle and rules were reused." if proof.kept else "")
        ),
    ]


def _shortfalls(proof: Proof, others: list[Proof], bounds: Path, reasons: Path) -> list[str]:
    """List scenarios that miss a goal, each with its reason; then those that do with other seeds."""
    found = shortfalls(proof, bounds, reasons)
    lines = ["## Scenarios that fall short", ""]
    if found:
        lines += [
            *_filled(
                f"{_of(proof, found)}. The next two columns show Carpool with the true batch latency, as the rules "
                "have it, and with the true request rate in addition. Where these are better, the cause is what "
                "Carpool had to learn; elsewhere it is the rule, or chance in what was measured. *Constant load*: "
                "the saving in each minute of constant load, from knowing nothing, at the load where it saved least"
                " during the 20 s or so of a load step. People write the reasons, in [a file of their "
                "own](../benchmarks/proof/shortfalls.json)."
            ),
            "",
            *_table(found),
            *_savings(proof, found),
        ]
    else:
        lines += [f"None: every goal is met in each of the {len(proof.scenarios)} scenarios."]
    for name, why in proof.left_out.items():
        lines += ["", f"Left out: {name}, {why}"]
    for other in others:
        if missed := shortfalls(other, bounds, reasons):
            data = f"[its data](../benchmarks/results/{data_file(other.seed).name})"
            code = "the same code" if other.commit == proof.commit else f"the code of {other.commit}, {other.date}"
            text = f"With seed {other.seed} ({data}), so with other requests, and {code}: {_of(other, missed)}."
            lines += ["", *_filled(text), "", *_table(missed), *_savings(other, missed)]
    return lines


def _of(proof: Proof, found: list[Shortfall]) -> str:
    names = {each.scenario for each in found} - {verdict.EVERYWHERE}
    return f"{len(names)} of {len(proof.scenarios)} miss a goal"


def _table(found: list[Shortfall]) -> list[str]:
    lines = _header(
        "scenario",
        "measure",
        "measured",
        "with the true batch latency",
        "and the true load",
        "constant load",
        "goal",
        "reason",
    )
    for each in found:
        title = _title(each.measure) if each.scenario == verdict.EVERYWHERE else MEASURES[each.measure].title
        bound = f"{each.limit.direction} {verdict.show(each.measure, each.limit.aim)}"
        better_informed = ("-" if value is None else verdict.show(each.measure, value) for value in each.told)
        alone = "-" if each.rest is None else f"at {each.rest.load:.0%}: {verdict.by_minute(each.rest)}"
        lines.append(
            f"| {each.scenario} | {title} | {verdict.show(each.measure, each.value)} | {' | '.join(better_informed)} "
            f"| {alone} "
            f"| {bound} | {each.reason or '**not explained**'} |"
        )
    return lines


def _savings(proof: Proof, found: list[Shortfall]) -> list[str]:
    """Put Carpool beside the rules that save more at the median, if there are any."""
    if not any(each.scenario == verdict.EVERYWHERE and each.measure == "saving, ahead" for each in found):
        return []
    lines = _header(
        "rule",
        f"loads within {verdict.NEAR:.2%} of the oracle's saving, or above",
        f"loads below {verdict.POOR:.0%} of it",
        "mean",
        "worst highest load, of the oracle's",
    )
    lines += [
        f"| {each.title} | {each.near} of {each.loads} | {each.poor} | {each.mean:.1%} | {each.highest:.1%} |"
        for each in verdict.beside_those_ahead(proof)
    ]
    text = f"Carpool with seed {proof.seed} beside the rules that save more device time at the median:"
    return ["", *_filled(text), "", *lines]


def _goals(proof: Proof, others: list[Proof], bounds: Path) -> list[str]:
    """Put every figure beside its goal and its limit, other seeds' beside it."""
    known = limits(bounds)
    seeds = [proof, *others]
    measured = [figures(each) for each in seeds]
    lines = [
        "## Goals",
        "",
        *_filled(
            "Worst and median are over scenarios; for savings, over each scenario's loads. `make proof` fails beyond "
            "a limit. It is the goal itself, or a figure that may not get worse: the worse of two seeds, with room "
            "for differences between seeds."
        ),
        "",
        *_header("figure", "goal", "limit", *(f"seed {each.seed}" for each in seeds)),
    ]
    for name, limit in known.items():
        values = []
        for each in measured:
            if name not in each:
                values.append("-")
                continue
            text = verdict.show(name, each[name].value)
            values.append(text if limit.reaches(each[name].value) else f"**{text}**")
        lines.append(
            f"| {_title(name)} | {limit.direction} {verdict.show(name, limit.aim)} | {verdict.show(name, limit.value)} "
            f"| {' | '.join(values)} |"
        )
    return [*lines, "", "Bold: the goal is missed.", *_beyond(seeds, bounds)]


def _beyond(proofs: list[Proof], bounds: Path) -> list[str]:
    """Name the limits that the runs break."""
    lines: list[str] = []
    for each in proofs:
        if broken := verdict.missed(each, bounds):
            lines += ["", f"**Beyond its limits** with seed {each.seed}, so that `make proof` fails:", ""]
            lines += [f"- {one}" for one in broken]
    return lines


def _title(figure: str) -> str:
    measure, _, kind = figure.partition(", ")
    return f"{MEASURES[measure].title}: {kind if kind != 'ahead' else 'median, ahead of the best rule by'}"


def _contenders(proof: Proof) -> list[str]:
    """Put everybody beside everybody, best first."""
    lines = [
        "## Beside other rules",
        "",
        "![Both shares of every contender, a dot a scenario](images/proof-shares.svg)",
        "",
        *_filled(
            "Shares are of the oracle's. A saving counts only where no more than 1 % of the requests miss. Misses "
            "are over whole timelines, beyond the oracle's. *Good*: the share of all timelines' phases that reached "
            "5 s with at most 1 % more misses than the oracle and 90 % of its saving, and the median time until "
            "then. *Flips*: A, B, A at constant load, in all timelines. Best first, by the lower of the two medians: "
            "it is easy to meet the SLO at a high load and save nothing, and the reverse."
        ),
        "",
        *_header(
            "rule",
            "highest load: median",
            "worst",
            "time saved: median",
            "worst",
            "more misses: median",
            "worst",
            "good",
            "after",
            "flips",
        ),
    ]
    table = []
    for each in proof.contenders:
        loads = verdict.highest_loads(proof, each.name)
        saved = [gain.share for one in savings(proof, each.name).values() for gain in one.values()]
        extra = verdict.extra_misses(proof, each.name)
        recoveries = [recovery for line in proof.timelines if line.contender == each.name for recovery in line.phases]
        took = [recovery.seconds for recovery in recoveries if recovery.seconds is not None]
        flips = sum(recovery.flips for recovery in recoveries)
        title = f"**{each.title}**" if each.name == CARPOOL else each.title
        cells = [
            f"{median_share(proof, each.name, 'highest load'):.1%}",
            f"{worst('highest load', loads):.1%}",
            f"{median(saved):.1%}" if saved else "-",
            f"{min(saved):.1%}" if saved else "-",
            f"{median(extra.values()):+.2%}",
            f"{max(extra.values()):+.2%}",
            f"{len(took) / len(recoveries):.0%}",
            f"{median(took):.0f} s" if took else "-",
            f"{flips}",
        ]
        weaker = min(median_share(proof, each.name, share) for share in ("highest load", "saving"))
        table.append((weaker, f"| {title} | {' | '.join(cells)} |"))
    lines += [line for _, line in sorted(table, key=lambda each: -each[0])]
    lines += ["", *_filled(f"{_ahead(proof)} [Every rule in every scenario](proof-figures.md)."), ""]
    lines += [
        *_filled(
            "Each as its source has it, but for one bound: nobody here, the oracle included, holds a request for more "
            "than half the SLO, the default of `bounds.maxWait`. A longer wait may save more."
        ),
        "",
    ]
    lines += [f"- {each.title}: {each.cite}" for each in proof.contenders if each.name != CARPOOL]
    return lines


def _ahead(proof: Proof) -> str:
    """Say who is ahead of Carpool in what, at the median."""
    names: dict[str, list[str]] = {}
    for share in ("highest load", "saving"):
        own = median_share(proof, CARPOOL, share)
        names[share] = [
            each.title
            for each in proof.contenders
            if each.name != CARPOOL and median_share(proof, each.name, share) > own
        ]
    both = [name for name in names["highest load"] if name in names["saving"]]
    return (
        f"Ahead of Carpool at the median: in the highest load {', '.join(names['highest load']) or 'none'}; in device "
        f"time {', '.join(names['saving']) or 'none'}; in both {', '.join(both) or 'none'}."
    )


def _scenarios(proof: Proof) -> list[str]:
    """Show each scenario's own figures, and the pictures."""
    lines = [
        "## Scenario by scenario",
        "",
        *_filled(
            "Carpool's figures. *Holds*: the highest load with at most 1 % misses, as a share of the oracle's. "
            "*Saves*: the least share of the oracle's saving at 10 to 60 % load, with the oracle's largest saving in "
            "brackets; empty where that is below 5 %. *Good after*: seconds, for each phase."
        ),
        "",
        *_header(
            "scenario",
            "what it shows",
            "device",
            "p99",
            "arrivals",
            "capacity",
            "holds",
            "saves",
            "more misses",
            "good after",
        ),
    ]
    loads, saved = verdict.highest_loads(proof, CARPOOL), savings(proof, CARPOOL)
    extra = verdict.extra_misses(proof, CARPOOL)
    timelines = {line.scenario: line for line in proof.timelines if line.contender == CARPOOL}
    for about in proof.scenarios:
        gains = saved.get(about.name, {}).values()
        saves = (
            f"{min(each.share for each in gains):.0%} ({max(each.available for each in gains):.0%})" if gains else ""
        )
        took = ", ".join(
            "never" if each.seconds is None else f"{each.seconds:.0f}" for each in timelines[about.name].phases
        )
        cells = [
            about.name,
            about.why,
            f"{about.profile}{f' x {about.replicas}' if about.replicas > 1 else ''}",
            f"{about.slo * 1e3:g} ms",
            about.arrivals,
            f"{about.capacity:,.0f}/s",
            f"{loads[about.name]:.1%}" if about.name in loads else "-",
            saves,
            f"{extra[about.name]:+.2%}",
            took,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "![Misses by load, a panel a scenario](images/proof-misses.svg)",
        "",
        "![Device time by load, a panel a scenario](images/proof-device-time.svg)",
        "",
        "![Misses over each timeline](images/proof-timelines.svg)",
    ]
    return lines


def _alone(proof: Proof) -> list[str]:
    """Show what only Carpool was put through."""
    lines = ["## Forecasts, hours, bad settings", ""]
    lines += [
        *_filled(
            "The tuner's forecast of the p99, and the simulated p99 of that setting. First for the oracle's setting, "
            "with the true batch latency and arrival process; then for Carpool's own, as forecast under rising load "
            f"with the batch latency that it had learned. The simulated p99 is of up to {FORECAST_RUNS} runs of "
            f"{FORECAST_REQUESTS:,} requests each (±: half of the 95 % interval); of up to {FORECAST_ENOUGH} where no "
            f"limit applies, above {UTILIZED:.0%} utilization and for Carpool's own. The device is warm: each size "
            "was used before."
        ),
        "",
        *_header("scenario", "load", "utilization", "p99", "forecast", "off", "own p99", "forecast", "off"),
    ]
    for one in proof.forecasts:
        own = "| | |"
        if one.learned is not None and one.realized:
            own = (
                f"| {one.realized * 1e3:.2f} ms | {one.learned * 1e3:.2f} ms | {one.learned / one.realized - 1:+.1%} |"
            )
        lines.append(
            f"| {one.scenario} | {one.load:.0%} | {one.utilization:.0%} | {one.simulated * 1e3:.2f} ms "
            f"±{one.doubt:.1%} | {one.told * 1e3:.2f} ms | {one.told / one.simulated - 1:+.1%} {own}"
        )
    lines += [
        "",
        "An hour at constant load, for scenarios in which a load of 20 to 50 % is at most 200 requests/s:",
        "",
        *_header("scenario", "load", "requests/s", "misses", "settings used", "flips"),
    ]
    lines += [
        f"| {one.scenario} | {one.load:.0%} | {one.rate:.0f} | {one.misses:.2%} | {one.changes} | {one.flips} |"
        for one in proof.hours
    ]
    lines += [
        "",
        *_filled(
            "The worst setting within bounds, sent to a sidecar whose setting was good, at up to 400 requests/s. "
            "Requests count from the first that missed. Scenarios in which no setting is bad at such a load are left "
            "out."
        ),
        "",
        *_header("scenario", "requests/s", "good", "bad", "misses of the bad one", "taken back after"),
    ]
    lines += [
        f"| {one.scenario} | {one.rate:.0f} | {one.good} | {one.bad} | {one.misses:.0%} "
        f"| {'never' if one.requests is None else f'{one.requests} requests'} |"
        for one in proof.rollbacks
    ]
    return lines


def _method(proof: Proof) -> list[str]:
    """Say how all of this is measured, and how to repeat it."""
    return [
        "## How it is measured",
        "",
        *_filled(
            "- **The oracle** is the best setting of a grid over batch, wait and batches in flight, for each load. It "
            "has to meet the tuner's own rule: at most 0.5 % misses, now and at 1.25 times the load. The few best of "
            "each load are played with the same arrivals as all rules, and the best of these counts."
        ),
        *_filled(
            f"- **Loads** rise from 10 % of the capacity to {proof.scenarios[0].loads[-2]:.0%} of it in one run, "
            "then to twice the capacity. A step is judged by at least 3,000 requests, from 70 % on by 8,000, after "
            "some time for the rules to adapt. The load at which misses exceed 1 % is read from a curve that rises "
            "with the load, so that chance in one step does not count. No rule is informed when the load changes."
        ),
        *_filled("- **Timelines** are each scenario's own: two minutes from knowing nothing, then a change."),
        *_filled(
            "- **Carpool** is what a sidecar runs by default: [first calls](decisions/0052-first-calls.md), then the "
            "tuner, and [batches of copies](decisions/0044-batches-of-copies.md) beside the requests, whose device "
            "time counts. Other rules, and the oracle, use the device for requests only."
        ),
        *_filled(
            "- **Equal conditions**: the same requests at the same times, and the same noise for the device's "
            "k-th batch."
        ),
        "",
        *_filled(
            "The scenarios are data, in [benchmarks/scenarios](../benchmarks/scenarios). Two of them need the Azure "
            "LLM 2023 conversation trace, in the folder that `CARPOOL_TRACES` names; without it they are left out, "
            "and the command says where to get it. All of it takes about half an hour on two cores. Another seed is "
            "written to a file of its own:"
        ),
        "",
        "<!-- not run: minutes -->",
        "```bash",
        "make proof          # writes this page",
        "make proof SEED=7   # other requests: the same conclusions?",
        "make proof-quick    # what CI runs: a few scenarios, limits of their own",
        "```",
        "",
        "One scenario, one rule (`--help` lists them):",
        "",
        "<!-- not run: a minute -->",
        "```bash",
        ".venv/bin/python benchmarks/proof --scenario synthetic-1-executor --contender carpool",
        "```",
    ]


def _header(*columns: str) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def _filled(text: str) -> list[str]:
    """Break a paragraph into lines as long as people write them."""
    indent = "  " if text.startswith("- ") else ""
    return textwrap.wrap(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
