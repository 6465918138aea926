"""The page of real engines, from the files that benchmarks/peers wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from carpool.policy.durations import format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Peer = dict[str, Any]

_LOAD = """\
## Load

Open-loop Poisson arrivals, one row a request, in JSON. Good: the right answer by the SLO, counted from when the request
was due. *Steady* leaves out the seconds that a pause of the machine touched. Device: milliseconds of the device for
each right answer, what batching saves. CPU: milliseconds of user and system time of all the engine's processes for each
right answer, the model server's included. Others: cores of this machine that neither engine nor generator had. Denied:
share of the CPU time that the engine wanted in which its threads stood in line for a core.
*Carpool beside* is Carpool within minutes of the rows around it: compare with these, since what else the machine has to
do differs by the hour."""

_CANCELS = """\
## Clients that hang up

One client in five hangs up within 20 ms. What the others got: an error that was not theirs, no answer, or another's.
Rows computed includes those that nobody waited for any more."""

_POISON = """\
## Requests that fail

One request a second makes the batch it is in fail. What the others got: its error, no answer, or another's."""


def page(peers: Sequence[Peer], generated: str) -> str:
    """Return the page; ``generated`` is the note that it is generated."""
    lines = ["# Real engines", "", generated]
    lines += ["What is measured, and how: [benchmarks](../benchmarks.md#real-engines).", ""]
    if not peers:
        return "\n".join([*lines, "`make peers` has not been run for the record yet."]) + "\n"
    both = [(peer, setting) for peer, setting in _each(peers) if setting["cancels"]]
    for part in (
        _in_short(peers),
        _settings(peers),
        [_LOAD, "", *_loads(peers)],
        [_CANCELS, "", *_cancels(both)],
        [_POISON, "", *_poison(both)],
        _named_stalls(peers),
        _tried(peers),
    ):
        lines += [*part, ""]
    return "\n".join(lines[:-1]) + "\n"


def _each(peers: Iterable[Peer]) -> Iterator[tuple[Peer, Any]]:
    for peer in peers:
        for setting in peer["settings"]:
            yield peer, setting


def _in_short(peers: Sequence[Peer]) -> Iterator[str]:
    """Yield a line for each setting, and the conclusion."""
    trials = [trial for _, setting in _each(peers) for trial in setting["trials"]]
    yield "## In short"
    yield ""
    if trials:
        others = sorted(trial["others_cores"] for trial in trials)
        stalled, seconds = sum(len(trial["stalled"]) for trial in trials), sum(trial["seconds"] for trial in trials)
        yield f"Noise: beside these runs others took {others[0]:.1f} to {others[-1]:.1f} cores (median"
        yield f"{others[len(others) // 2]:.1f}), and pauses of the machine touched {stalled} of {seconds:g} seconds."
        yield "*Denied* is the share of the CPU time that an engine wanted in which it stood in line for a core: where"
        yield "it is high, answers are late for the machine's other work and not for batches. Compare with *Carpool"
        yield "beside*, taken within minutes. Good, denied, device and CPU are by rate."
        yield ""
    yield from _head("engine, setting, requests/s, good, denied, device ms, CPU ms, lost or wrong, errors by poison")
    for peer, setting in _each(peers):
        trials, hung_up, failing = setting["trials"], setting["cancels"], setting["poison"]
        found = (
            "" if hung_up is None else sum(seen["wrong"] + sum(seen["lost"].values()) for seen in (hung_up, failing))
        )
        along = "" if failing is None else f"{_along(failing):.1f}"
        by_rate = [
            " / ".join(f"{trial['rate']:g}" for trial in trials),
            " / ".join(_share(trial["good_share"]) for trial in trials),
            " / ".join(_share(trial["denied"]) or "-" for trial in trials),
            *(" / ".join(_cost(trial, cost) or "-" for trial in trials) for cost in ("device_ms", "cpu_ms")),
        ]
        yield _row([peer["title"], setting["name"], *by_rate, found, along])


def _settings(peers: Sequence[Peer]) -> Iterator[str]:
    """Yield the settings of the runs."""
    yield "## Engines"
    yield ""
    yield from _head("engine, versions, default, tuned by hand, SLO, device, commit, taken")
    for peer in peers:
        versions = ", ".join(f"{name} {version}" for name, version in peer["versions"].items())
        tuned = next((_written(each["settings"]) for each in peer["settings"] if each["name"] == "tuned"), "")
        yield (
            f"| {peer['title']} | {versions} | {peer['default']} | {tuned} | {format_seconds(peer['slo'])} "
            f"| `{peer['profile']}` | {peer['commit']} | {peer['date']}, `{peer['command']}` |"
        )
    machine = peers[0]["machine"]
    yield ""
    yield f"{machine['cores']} cores of {machine['cpu']}, {machine['system']}; Carpool on Python {machine['python']}."
    for peer in peers:
        if peer["failed"]:
            yield ""
            yield f"{peer['title']} gave no complete results: {' '.join(peer['failed'].split())}"


def _loads(peers: Sequence[Peer]) -> Iterator[str]:
    columns = "engine, setting, requests/s, good, steady, p50, p99, steady p99, rows a batch, device, CPU"
    yield from _head(f"{columns}, stalled, others, denied")
    for peer, setting in _each(peers):
        for trial in setting["trials"]:
            limits = " (the generator was a bottleneck)" if trial["generator_limits"] else ""
            cells = [
                peer["title"],
                setting["name"],
                f"{trial['rate']:g}{limits}",
                _share(trial["good_share"]),
                _share(trial["steady_good_share"]),
                *map(_time, (trial["p50"], trial["p99"], trial["steady_p99"])),
                f"{trial['rows_a_batch']:.1f}",
                *(_cost(trial, cost) for cost in ("device_ms", "cpu_ms")),
                f"{len(trial['stalled'])} of {trial['seconds']:g} s",
                f"{trial['others_cores']:.1f}",
                _share(trial["denied"]),
            ]
            yield _row(cells)


def _cancels(found: Sequence[tuple[Peer, Any]]) -> Iterator[str]:
    yield from _head("engine, setting, requests/s, hung up, others, error, lost, wrong, rows computed, serves after")
    for peer, setting in found:
        seen = setting["cancels"]
        cells = [peer["title"], setting["name"], f"{seen['rate']:g}", seen["misbehaved"], *_outcome(seen)]
        yield _row([*cells, seen["rows_computed"], "yes" if seen["serves_after"] else "NO"])


def _poison(found: Sequence[tuple[Peer, Any]]) -> Iterator[str]:
    columns = (
        "engine, setting, requests/s, poisoned, others, error, lost, wrong, rows a batch, errors for each poisoned"
    )
    yield from _head(f"{columns}, serves after")
    for peer, setting in found:
        seen = setting["poison"]
        cells = [peer["title"], setting["name"], f"{seen['rate']:g}", seen["misbehaved"], *_outcome(seen)]
        batch = f"{seen['rows_a_batch']:.1f}"
        yield _row([*cells, batch, f"{_along(seen):.1f}", "yes" if seen["serves_after"] else "NO"])


def _along(seen: Any) -> float:  # noqa: ANN401 - as read from JSON
    """Return the number of innocent requests that shared each poisoned request's error; other errors are shed load."""
    shared = sum(count for status, count in seen["refused"].items() if status in seen["their_answers"])
    return float(shared / max(seen["misbehaved"], 1))


def _outcome(seen: Any) -> list[Any]:  # noqa: ANN401 - as read from JSON
    """Return the results of the innocent requests."""
    return [seen["innocents"], _counts(seen["refused"]), _counts(seen["lost"]), seen["wrong"]]


def _head(columns: str) -> Iterator[str]:
    names = columns.split(", ")
    yield _row(names)
    yield "|" + "---|" * len(names)


def _row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _named_stalls(peers: Sequence[Peer]) -> Iterator[str]:
    """Yield the seconds in which the machine paused."""
    yield "## Stalled windows"
    yield ""
    yield "Seconds of the measured part that a pause of the machine touched, and the longest pause. None: not listed."
    yield ""
    yield from _head("engine, setting, requests/s, seconds, longest")
    for peer, setting in _each(peers):
        for trial in setting["trials"]:
            if trial["stalled"]:
                seconds = ", ".join(f"{start:g}" for start in trial["stalled"])
                yield (
                    f"| {peer['title']} | {setting['name']} | {trial['rate']:g} | {seconds} "
                    f"| {_time(trial['longest_stall'])} |"
                )


def _tried(peers: Sequence[Peer]) -> Iterator[str]:
    """Yield the grids."""
    yield "## What was tried by hand"
    yield ""
    yield "A few seconds at each rate. Taken: of those within a point of the most good answers, the least device time."
    yield "Rates above one that was mostly missed were not tried and count as missed."
    yield ""
    yield from _head("engine, setting, good by rate, device ms by rate")
    for peer in peers:
        for each in peer["tried"]:
            shares = ", ".join(_share(share) for share in each["good_shares"]) or each["failed"]
            costs = ", ".join(f"{cost:.2f}" for cost in each["device_ms"])
            yield f"| {peer['title']} | {_written(each['settings'])} | {shares} | {costs} |"


def _written(settings: dict[str, Any]) -> str:
    return ", ".join(f"`{name}={value}`" for name, value in settings.items())


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _time(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:,.0f} ms"


def _cost(trial: Any, name: str) -> str:  # noqa: ANN401 - as read from JSON
    """Return the cost of a right answer, if there were any."""
    return f"{trial[name]:.2f}" if trial["p50"] is not None else ""


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "0"
