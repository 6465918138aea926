"""Pictures of a run: small multiples as SVG, which take on the reader's light or dark colours by themselves."""

from __future__ import annotations

from html import escape
from math import ceil, log
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from proof.measures import rising
from proof.rows import CARPOOL, COURSE, LAZY, ORACLE
from proof.verdict import CONSIDERED, highest_loads, savings, stairs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from proof.rows import About, Proof

STYLE = """
    .page { fill: #ffffff; } text { fill: #1f2933; } .small { fill: #4a5865; font-size: 9px; }
    .frame { fill: none; stroke: #c4ccd4; } .grid { stroke: #c4ccd4; stroke-dasharray: 2 2; }
    .rival { stroke: #97a3af; fill: none; stroke-width: 0.8; }
    .oracle { stroke: #1f2933; fill: none; stroke-dasharray: 4 2; }
    .carpool { stroke: #1d8a62; fill: none; stroke-width: 2; } .load { fill: #dfe7ef; shape-rendering: crispEdges; }
    .dot { fill: #97a3af; fill-opacity: 0.55; } .own { fill: #1d8a62; fill-opacity: 0.6; }
    .middle { stroke: #c2642d; stroke-width: 2.5; }
    @media (prefers-color-scheme: dark) {
      .page { fill: #0d1117; } text { fill: #dbe3ea; } .small { fill: #9fb0c0; }
      .frame { stroke: #36424f; } .grid { stroke: #465462; }
      .rival { stroke: #66737f; } .oracle { stroke: #dbe3ea; } .carpool { stroke: #4fd3a2; } .load { fill: #1d2834; }
      .dot { fill: #7d8b98; } .own { fill: #4fd3a2; } .middle { stroke: #f0965a; }
    }
"""

WIDTH = 960
COLUMNS = 5
CELL = (WIDTH / COLUMNS, 132.0)
HEAD = 44.0
"""Height above small multiples, for title and legend."""

MOST_MISSES = 0.05
MOST_TIME = 1.2
"""Ends of the axes: what is beyond runs along the edge."""

LEGEND = (("carpool", "Carpool"), ("oracle", "oracle"), ("rival", "rivals"))


class Panel(NamedTuple):
    """A rectangle on the page that shows [x0, x1] by [y0, y1]; what lies outside is drawn on its edge."""

    left: float
    top: float
    width: float
    height: float
    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return where a point is drawn."""
        across = min(max((x - self.x[0]) / (self.x[1] - self.x[0]), 0.0), 1.0)
        up = min(max((y - self.y[0]) / (self.y[1] - self.y[0]), 0.0), 1.0)
        return self.left + across * self.width, self.top + (1 - up) * self.height

    def line(self, style: str, points: Iterable[tuple[float, float]]) -> str:
        """Draw a line through points."""
        return f'<polyline class="{style}" points="{" ".join("{:.1f},{:.1f}".format(*self.at(*p)) for p in points)}"/>'

    def across(self, y: float, word: str) -> str:
        """Draw a dashed line at a height, and name it at the left."""
        left, height = self.at(self.x[0], y)
        right = left + self.width
        return (
            f'<line class="grid" x1="{left:.1f}" y1="{height:.1f}" x2="{right:.1f}" y2="{height:.1f}"/>'
            f'<text class="small" x="{left - 3:.1f}" y="{height + 3:.1f}" text-anchor="end">{word}</text>'
        )

    def tick(self, x: float, word: str) -> str:
        """Name a place below."""
        return _text(self.at(x, self.y[0])[0], self.top + self.height + 10, word, "small", "middle")

    def frame(self, title: str) -> str:
        """Draw the edge, and a title above."""
        return (
            f'<rect class="frame" x="{self.left:.1f}" y="{self.top:.1f}" width="{self.width:.1f}" '
            f'height="{self.height:.1f}"/>{_text(self.left, self.top - 4, title, "small")}'
        )


def misses(proof: Proof) -> str:
    """Draw the share of requests that missed by load, made to rise with it, a panel a scenario."""
    lowest = 0.5

    def panel(place: Panel, about: About) -> list[str]:
        parts = [place.across(0.01, "1 %"), place.across(MOST_MISSES, "5 %")]
        parts += [place.tick(load, f"{load:.0%}") for load in (lowest, 0.8, 1.0)]
        for style, name in _order(proof):
            stair = stairs(proof, name).get(about.name)
            if stair is not None:
                curve = zip(about.loads, rising(stair.steps[:-1]), strict=False)
                parts.append(place.line(style, (point for point in curve if point[0] >= lowest)))
        return parts

    title = "Requests missed by load (100 %: the most that the best setting can hold); beyond 5 % along the edge"
    return _multiples(title, proof.scenarios, panel, (lowest, 1.04), (0.0, MOST_MISSES))


def device_time(proof: Proof) -> str:
    """Draw device time per request by load beside zero-wait's, with a panel for each scenario."""

    def panel(place: Panel, about: About) -> list[str]:
        parts = [place.across(level, f"{level:.0%}") for level in (0.5, 1.0)]
        parts += [place.tick(load, f"{load:.0%}") for load in (0.1, 0.35, 0.6)]
        lazy = stairs(proof, LAZY)[about.name].steps
        for style, name in _order(proof):
            stair = stairs(proof, name).get(about.name)
            if stair is not None:
                points = [
                    (load, step.device_time / zero.device_time)
                    for load, step, zero in zip(about.loads, stair.steps, lazy, strict=True)
                    if CONSIDERED[0] <= load <= CONSIDERED[1]
                ]
                parts.append(place.line(style, points))
        return parts

    title = "Device time a request by load, as a share of zero-wait's at the largest batch"
    return _multiples(title, proof.scenarios, panel, CONSIDERED, (0.0, MOST_TIME))


def timelines(proof: Proof) -> str:
    """Draw the misses of Carpool and of the oracle over each scenario's timeline, before the load."""
    courses = {(line.scenario, line.contender): line.course for line in proof.timelines}

    def panel(place: Panel, about: About) -> list[str]:
        parts = []
        last = proof.phases[about.name][-1]
        end = last.start + last.seconds
        place = place._replace(x=(0.0, end))
        for phase in proof.phases[about.name]:
            # The load is drawn to a scale of its own: the panel's full height is 1.25 times the capacity.
            left, top = place.at(phase.start, phase.load / 1.25 * MOST_MISSES)
            right, bottom = place.at(phase.start + phase.seconds, 0.0)
            parts.append(
                f'<rect class="load" x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" '
                f'height="{bottom - top:.1f}"/>'
            )
        other = max(proof.phases[about.name], key=lambda phase: abs(log(phase.device)))
        if other.device != 1.0:
            middle = place.at(other.start + other.seconds / 2, 0.0)[0]
            parts.append(_text(middle, place.top + 10, f"t(b) x {other.device:.3g}", "small", "middle"))
        parts += [place.across(0.01, "1 %"), place.across(MOST_MISSES, "5 %")]
        parts.append(place.tick(end, f"{end:.0f} s"))
        for style, name in (("oracle", ORACLE), ("carpool", CARPOOL)):
            course = courses.get((about.name, name), ())
            parts.append(place.line(style, (((index + 0.5) * COURSE, value) for index, value in enumerate(course))))
        return parts

    title = f"Requests missed over each timeline, every {COURSE} s, from knowing nothing; behind it the load"
    return _multiples(title, proof.scenarios, panel, (0.0, 1.0), (0.0, MOST_MISSES), LEGEND[:2])


def shares(proof: Proof) -> str:
    """Draw both shares of every contender, a dot a scenario, its median marked."""
    height, left, width = 20.0, 250.0, 320.0
    rows = [each for each in proof.contenders if each.name != ORACLE]
    whole = HEAD + 22 + height * len(rows) + 26
    parts = [
        _text(12, 20, "How close to the oracle: a dot a scenario (of savings, one a load, too); bar: median", "name")
    ]
    columns: tuple[tuple[str, Callable[[str], list[float]], tuple[float, float]], ...] = (
        ("highest load", lambda name: list(highest_loads(proof, name).values()), (0.0, 1.05)),
        (
            "device time saved at 10-60 % load",
            lambda name: [gain.share for each in savings(proof, name).values() for gain in each.values()],
            (-0.1, 1.2),
        ),
    )
    for number, (title, values_of, span) in enumerate(columns):
        place = Panel(left + number * (width + 40), HEAD + 18, width, height * len(rows), span, (len(rows), 0.0))
        parts.append(place.frame(title))
        for share in (0.0, 0.5, 1.0):
            x = place.at(share, 0)[0]
            bottom = place.top + place.height
            parts.append(f'<line class="grid" x1="{x:.1f}" y1="{place.top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}"/>')
            parts.append(_text(x, bottom + 12, f"{share:.0%}", "small", "middle"))
        for row, contender in enumerate(rows):
            values = values_of(contender.name)
            style = "own" if contender.name == CARPOOL else "dot"
            for value in values:
                x, y = place.at(value, row + 0.5)
                parts.append(f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="3.2"/>')
            if values:
                x, y = place.at(median(values), row + 0.5)
                parts.append(f'<line class="middle" x1="{x:.1f}" y1="{y - 8:.1f}" x2="{x:.1f}" y2="{y + 8:.1f}"/>')
            if not number:
                parts.append(_text(left - 10, place.at(0, row + 0.5)[1] + 4, contender.title, "", "end"))
    return _page(whole, parts, "How close every contender comes to the oracle")


def _order(proof: Proof) -> list[tuple[str, str]]:
    """Return (style, contender), what matters most last: it is drawn on top."""
    rivals = [("rival", each.name) for each in proof.contenders if each.name != CARPOOL]
    return [*rivals, ("oracle", ORACLE), ("carpool", CARPOOL)]


def _multiples(
    title: str,
    scenarios: Sequence[About],
    draw: Callable[[Panel, About], list[str]],
    x: tuple[float, float],
    y: tuple[float, float],
    legend: Sequence[tuple[str, str]] = LEGEND,
) -> str:
    """Lay out a panel a scenario."""
    parts = [_text(12, 20, title, "name")]
    for number, (style, word) in enumerate(legend):
        at = 12 + 90 * number
        parts.append(
            f'<line class="{style}" x1="{at}" y1="32" x2="{at + 22}" y2="32"/>{_text(at + 27, 35, word, "small")}'
        )
    for number, about in enumerate(scenarios):
        left, top = number % COLUMNS * CELL[0], HEAD + number // COLUMNS * CELL[1]
        place = Panel(left + 30, top + 18, CELL[0] - 42, CELL[1] - 36, x, y)
        parts += [*draw(place, about), place.frame(about.name)]
    return _page(HEAD + ceil(len(scenarios) / COLUMNS) * CELL[1] + 6, parts, title)


def _page(height: float, parts: list[str], title: str) -> str:
    body = "\n  ".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        "font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif\" font-size=\"12\" "
        f'role="img" aria-labelledby="t">\n  <title id="t">{escape(title)}</title>\n  <style>{STYLE}  </style>\n'
        f'  <rect class="page" width="{WIDTH}" height="{height:.0f}"/>\n  {body}\n</svg>\n'
    )


def _text(x: float, y: float, words: str, style: str, anchor: str = "start") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
