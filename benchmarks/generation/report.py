"""`docs/generation-figures.md` and its picture, from `benchmarks/results/generation.json`."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evidence import limits

from carpool.policy.durations import format_seconds
from generation.world import scenarios

if TYPE_CHECKING:
    from collections.abc import Sequence

    from generation.figures import Row

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
PAGE = DOCS / "generation-figures.md"
PICTURE = DOCS / "images" / "generation-overload.svg"

RULES = ("carpool", "best cap", "AIMD on TPOT", "cap 100", "queued tokens", "no gate")


def main(record: Any, *, check: bool) -> int:  # noqa: ANN401 - `Record` of `__main__`
    """Write the page and the picture, or say whether the page is that of the record."""
    text = page(record)
    if check:
        kept = PAGE.read_text("utf-8")
        sys.stdout.writelines(
            difflib.unified_diff(kept.splitlines(keepends=True), text.splitlines(keepends=True), str(PAGE), "expected")
        )
        return int(kept != text)
    PAGE.write_text(text, "utf-8")
    draw(record.rows, PICTURE)
    return 0


HEAD = """# Token streams: figures

Written by `make generation` from `benchmarks/results/generation.json`; do not edit. What the gate does is on
[its page](generation.md). All of it is simulated: the gate stands before a twin of the engine.

Taken at commit {commit}, {date}: {played} of {all} plays (a scenario with a seed). The same seeds give the same figures
on any machine.{others}

## Figures and limits

| figure | measured | limit | goal | why |
|---|---|---|---|---|
"""

OTHERS = """ The other rules were played at commit {commit}; the best cap was played again, and did the same."""

MIDDLE = """
![Goodput by load](images/generation-overload.svg)

## Every scenario

Requests per second that met both TTFT and TPOT. *Best cap*: the fixed number of requests in the engine with the most
goodput, of some fifteen that were tried on this very load; the number is in brackets. *AIMD*, *cap 100* and the best
cap refuse requests that would miss TTFT, and are given the engine's true step times for that. *Queue* is the
rule of vLLM's `--max-num-queued-tokens`. Seed 11 was never used to tune the gate. Where there is another tenant or
batch traffic, the figures are those of the scenario's own requests.

*Of best*: share of the best cap's goodput. *TTFT*, *TPOT*: the 99th percentile of the answers that the gate let
through, with `!` beyond the target: the gate goes for the most requests within both, not for 99 % of the answers.

*Bound*: what no rule exceeds, even one that knows every arrival and every length. Each request takes a least time of
the engine: its prompt, its tokens in a step that is as full as the engine allows, and its part of the cache. The
cheapest requests that fit into the time are counted. Up to the capacity that is nearly all that come; beyond it fewer.
It can't be reached: steps within the target are not that full. It is empty for measured tables, whose steps are no
line.

| scenario | seed | offered | Carpool | best cap | AIMD | cap 100 | queue | none | bound | of best | TTFT | TPOT |
|---|---|---|---|---|---|---|---|---|---|---|---|---|
"""

SCENARIOS = """
## What the scenarios are

| scenario | engine | TTFT | TPOT | what it is |
|---|---|---|---|---|
"""

TAIL = """
Loads are shares of the capacity: the steady load at which the mean time per output token reaches its target, by the
lengths of the very requests that are played. (By the mean of the whole trace, 240 s at 1.3 were 1.05 of what seed 11's
requests need: the trace has quarters of an hour with short answers.) Lengths are those of the Azure LLM inference trace
of 2023, conversations (CC-BY-4.0; Microsoft Azure, Patel et al., "Splitwise", ISCA 2024), in its order, where a
scenario does not say otherwise; arrivals are Poisson. The step times of the engines are in
[benchmarks/generation/profiles](../benchmarks/generation/profiles), each with its source.
"""


def page(record: Any) -> str:  # noqa: ANN401 - likewise
    """Return the page."""
    known = limits(HERE / "limits.json")
    others = OTHERS.format(commit=record.others) if record.others else ""
    plays = 2 * len(scenarios())
    text = HEAD.format(commit=record.commit, date=record.date[:10], played=len(record.rows), all=plays, others=others)
    for figure in record.figures:
        bound = known[figure.name]
        goal = "" if bound.goal is None else f"{bound.goal:g}{'' if bound.reaches(figure.value) else ' (missed)'}"
        limit = f"{bound.direction} {bound.value:g}"
        text += f"| {figure.name} | {figure.value:.3g} {bound.unit} | {limit} | {goal} | {bound.why} |\n"
    text += MIDDLE
    named = {scenario.name: scenario for scenario in scenarios()}
    order = {name: place for place, name in enumerate(named)}
    for row in sorted(record.rows, key=lambda row: (order[row.scenario], row.seed)):
        cells = [f"{row.rules[rule].goodput:.2f}" for rule in RULES]
        cells[1] += f" ({row.cap})"
        cells.append("" if row.bound is None else f"{row.bound:.2f}")
        start = f"| {row.scenario} | {row.seed} | {row.offered:.2f} |"
        slo, ours = named[row.scenario].slo, row.rules["carpool"]
        late = f"{_seconds(ours.ttft_p99, slo.ttft)} | {_seconds(ours.tpot_p99, slo.tpot)}"
        text += f"{start} {' | '.join(cells)} | {100 * row.share:.1f} % | {late} |\n"
    text += SCENARIOS
    for each in scenarios():
        targets = f"{each.ttft:g} s | {1000 * each.tpot:g} ms"
        text += f"| {each.name} | `{each.profile}` | {targets} | {each.why} |\n"
    return text + TAIL


def _seconds(value: float | None, target: float) -> str:
    """Return a percentile, marked where it exceeds its target."""
    if value is None:
        return ""
    return f"{format_seconds(float(f'{value:.3g}'))}{' !' if value > target else ''}"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw goodput over the offered load, for each family of scenarios."""
    import matplotlib as mpl  # noqa: PLC0415 - half a second that only this needs

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - likewise

    families = {scenario.name: scenario.family for scenario in scenarios() if scenario.family}
    names = list(dict.fromkeys(families.values()))
    styles = dict(zip(RULES, ("-o", "--s", ":^", ":v", "-.x", "-.+"), strict=True))
    with mpl.rc_context({"svg.hashsalt": "carpool", "font.size": 9}):
        figure, axes = plt.subplots(1, len(names), figsize=(10, 3.2), squeeze=False)
        for name, axis in zip(names, axes[0], strict=True):
            own = [row for row in rows if families.get(row.scenario) == name and row.seed == rows[0].seed]
            own.sort(key=lambda row: row.offered)
            offered = [row.offered for row in own]
            for rule, style in styles.items():
                axis.plot(offered, [row.rules[rule].goodput for row in own], style, label=rule, markersize=4)
            axis.set_title(name)
            axis.set_xlabel("offered, requests/s")
            axis.set_ylim(bottom=0)
        axes[0][0].set_ylabel("met TTFT and TPOT, requests/s")
        axes[0][-1].legend(fontsize=7)
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        plt.close(figure)
