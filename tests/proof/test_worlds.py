from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
import worlds
from proof.rows import CARPOOL


def row(contender, highest, device_time=1.0, world="line"):
    return worlds.Row(world, contender, highest, device_time)


@pytest.mark.parametrize("name", worlds.EVERY)
def test_each_load_brings_its_share_of_the_capacity(name):
    world = worlds.EVERY[name]
    assert all(world.times(rows) <= world.slo for rows in (1,))
    found = worlds.arrivals(world, seed=1)
    assert [time for time, _ in found] == sorted(time for time, _ in found)
    total = worlds.SECONDS * sum(worlds.LOADS) * world.capacity
    assert sum(rows for _, rows in found) == pytest.approx(total, rel=0.1)


def test_equal_seeds_bring_equal_requests():
    world = worlds.WORLDS["irregular heavy rows"]
    assert worlds.arrivals(world, seed=3)[:500] == worlds.arrivals(world, seed=3)[:500]
    assert worlds.arrivals(world, seed=3)[:500] != worlds.arrivals(world, seed=4)[:500]


def test_a_cliff_and_a_tight_target_bound_the_batches_that_count():
    assert worlds.WORLDS["cliff"].capacity == pytest.approx(24 / (0.012 + 0.0009 * 24))
    assert worlds.WORLDS["tight"].capacity == pytest.approx(4 * 4 / (0.03 + 0.003 * 4))


def test_carpool_is_judged_by_the_best_rule_of_each_world():
    lines, least = worlds.show([row(CARPOOL, 0.9, 2.0), row("greedy", 0.8), row("half-slo", 1.0, 3.0)])
    assert least == pytest.approx(0.9)
    assert lines[-1] == (
        "| line: fixed cost and cost per row | 90.0% | 100.0% (half-slo) | 80.0% | 2 ms | 1 ms (greedy) |"
    )


@pytest.mark.parametrize("others", [[], [row("greedy", 0.0, 0.0)]], ids=["no rule", "a rule that holds nothing"])
def test_without_a_rule_to_compare_with_there_is_no_verdict(others, capsys):
    least = worlds.show([row(CARPOOL, 0.9, 0.0), *others])[1]
    assert least is None
    assert worlds.judge(least) == 2
    assert "--contender" in capsys.readouterr().err


@pytest.mark.parametrize(("least", "code"), [(1.1, 0), (0.95, 0), (0.94, 1)])
def test_the_worst_world_decides(least, code, capsys):
    assert worlds.judge(least) == code
    assert f"at least {least:.1%}" in capsys.readouterr().out


def test_carpool_alone_with_one_seed_is_not_compared_with_rules_of_all_seeds(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["worlds.py", "--again", "--seed", "7"])
    with pytest.raises(SystemExit):
        worlds._options()
    assert "leave --seed or --again out" in capsys.readouterr().err


@pytest.fixture(scope="module")
def shares():
    """What each contender holds in each world by the record, over what the best rule does."""
    rows = msgspec.json.decode(worlds.RESULTS.read_bytes(), type=worlds.Results).rows
    best = {
        name: max(each.highest for each in rows if each.world == name and each.contender != CARPOOL)
        for name in worlds.WORLDS
    }
    return {(each.world, each.contender): each.highest / best[each.world] for each in rows}


def test_the_page_has_the_figures_of_the_record(shares):
    page = Path(__file__).parents[2] / "docs" / "benchmarks.md"
    text = " ".join(page.read_text().split("\n## Worlds\n")[1].split("\n## ")[0].split())
    ours = {name: shares[name, CARPOOL] for name in worlds.WORLDS}
    reached = sum(share >= worlds.GOAL for share in ours.values())
    below = [name for name, share in ours.items() if share < worlds.LIMIT]
    assert f"reaches it in {reached} of the {len(ours)}." in text
    named = " and ".join(f"`{name}`" for name in below)
    assert (f"With the present results it fails, because of {named}." in text) == bool(below)
    assert f"Carpool serves {ours['tight']:.2f} times the load of the best rule" in text
    assert f"(`noisy`), it serves {100 * ours['noisy']:.1f} %" in text
    assert ours["cliff"] == pytest.approx(1.0, abs=0.005)
    assert f"and {100 * ours['two cliffs']:.1f} % at two cliffs" in text
    assert f"(`early cliff`), it serves {100 * ours['early cliff']:.1f} %" in text
    assert f"Zero wait loses {100 - 100 * shares['cliff', 'greedy']:.0f} % of the load at a cliff" in text
    assert f"half the SLO loses {100 - 100 * shares['noisy', 'half-slo']:.0f} % where" in text
    # What misses the goal is on the page by its name.
    assert all(name in text for name, share in ours.items() if share < worlds.GOAL)
