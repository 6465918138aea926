from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest
from msgspec.structs import replace
from proof import plots, report, rows
from proof.rows import Rest
from tiny import proof

LIMIT = {"name": "saving, worst", "value": 0.7, "goal": 0.9, "unit": "x", "direction": "at least", "why": "why"}


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The report's own files, in a folder of the test."""
    for name, path in (("RESULTS", "results"), ("IMAGES", "images")):
        (tmp_path / path).mkdir()
        monkeypatch.setattr(report, name, tmp_path / path)
    monkeypatch.setattr(report, "PAGE", tmp_path / "proof.md")
    return tmp_path


def page(tmp_path, reasons, **changes):
    (tmp_path / "limits.json").write_text(json.dumps([LIMIT]))
    (tmp_path / "reasons.json").write_text(json.dumps(reasons))
    others = changes.pop("others", [])
    return report.page(proof(**changes), others, tmp_path / "limits.json", tmp_path / "reasons.json")


def test_what_falls_short_comes_first_with_its_reason(tmp_path):
    rest = Rest("plain", 0.5, (0.8, 0.97))
    text = page(tmp_path, {"plain": {"saving": "it learns slowly"}}, rests=[rest])
    first = next(line for line in text.splitlines() if line.startswith("## "))
    assert first == "## Scenarios that fall short"
    assert (
        "| plain | device time saved, of what the oracle saves | 75.0% | - | - | at 50%: 80%, 97% | at least 90.0% "
        "| it learns slowly |" in text
    )


def test_a_reason_that_nobody_gave_is_missed(tmp_path):
    assert "| **not explained** |" in page(tmp_path, {})


def test_rules_that_save_more_are_compared_for_each_seed(tmp_path):
    oracle = proof().stairs[0]
    ahead = [replace(each, steps=oracle.steps) if each.contender == "fixed" else each for each in proof().stairs]
    goals = json.dumps([LIMIT | {"name": "saving, ahead", "value": -1.0, "goal": 0.0}])
    (tmp_path / "limits.json").write_text(goals)
    (tmp_path / "reasons.json").write_text("{}")
    files = tmp_path / "limits.json", tmp_path / "reasons.json"
    text = report.page(proof(stairs=ahead), [proof(seed=7, stairs=ahead)], *files)
    for seed in (1, 7):
        assert f"Carpool with seed {seed} beside the rules that save more device time" in text
    assert text.count("| 0 of 1 | 1 | 75.0% |") == text.count("| 1 of 1 | 0 | 100.0% |") == 2
    assert "beside the rules that save more" not in report.page(proof(), [], *files), "nobody is ahead there"


def test_limits_that_are_broken_and_the_code_of_other_seeds_are_on_the_page(tmp_path):
    broken = LIMIT | {"value": 0.8}
    (tmp_path / "limits.json").write_text(json.dumps([broken]))
    (tmp_path / "reasons.json").write_text("{}")
    files = tmp_path / "limits.json", tmp_path / "reasons.json"
    text = report.page(proof(), [proof(seed=7), proof(seed=3, commit="abcd", date="2026-11-20")], *files)
    assert "**Beyond its limits** with seed 1" in text
    assert "- saving, worst: 0.75, at least 0.8 x. why" in text
    assert "Beyond its limits" not in page(tmp_path, {})
    flat = " ".join(text.split())
    assert "so with other requests, and the same code: 1 of 1" in flat
    assert "so with other requests, and the code of abcd, 2026-11-20: 1 of 1" in flat


def test_nothing_falls_short(tmp_path):
    oracle = proof().stairs[0]
    stairs = [replace(each, steps=oracle.steps) if each.contender == "carpool" else each for each in proof().stairs]
    text = page(tmp_path, {}, stairs=stairs)
    assert "None: every goal is met in each of the 1 scenarios." in text
    assert "not explained" not in text


def test_scenarios_that_were_left_out_are_reported(tmp_path):
    left_out = {"azure": "there is no trace"}
    assert "Left out: azure, there is no trace" in page(tmp_path, {}, left_out=left_out)


def test_contenders_are_ranked_by_the_weaker_of_both_shares(tmp_path):
    text = page(tmp_path, {})
    table = text[text.index("## Beside") : text.index("## Scenario by")]
    assert table.index("| **Carpool** | 93.8% |") < table.index("| greedy | 68.9% |")
    assert "Ahead of Carpool at the median: in the highest load none; in device time none; in both none." in table


def test_who_is_ahead_is_named(tmp_path):
    oracle = proof().stairs[0]
    stairs = [replace(each, steps=oracle.steps) if each.contender == "fixed" else each for each in proof().stairs]
    words = "in the highest load fixed; in device time fixed; in both fixed."
    assert f"Ahead of Carpool at the median: {words}" in page(tmp_path, {}, stairs=stairs)


def test_a_load_that_not_even_the_oracle_holds_is_nothing_to_compare(tmp_path):
    made = proof()
    nobody = [
        replace(each, scenario="dead", steps=tuple(replace(one, hits=0) for one in each.steps)) for each in made.stairs
    ]
    text = page(
        tmp_path,
        {},
        scenarios=[*made.scenarios, replace(made.scenarios[0], name="dead")],
        phases={**made.phases, "dead": made.phases["plain"]},
        stairs=[*made.stairs, *nobody],
        timelines=[*made.timelines, *(replace(each, scenario="dead") for each in made.timelines)],
    )
    assert "| 200/s | 93.8% | 75% (80%) |" in text
    assert "| 200/s | - |  |" in text


def test_another_seed_stands_beside_the_first(tmp_path):
    text = page(tmp_path, {}, others=[proof(seed=7)])
    assert "| figure | goal | limit | seed 1 | seed 7 |" in text
    assert "| at least 90.0% | 70.0% | **75.0%** | **75.0%** |" in text


def test_what_falls_short_with_another_seed_is_listed_too(tmp_path):
    kept = proof().stairs[0]
    stairs = [replace(each, steps=kept.steps) if each.contender == "carpool" else each for each in proof().stairs]
    text = page(tmp_path, {"plain": {"saving": "by luck"}}, stairs=stairs, others=[proof(seed=7)])
    assert text.index("None: every goal is met") < text.index("With seed 7") < text.index("| by luck |")
    told = page(tmp_path, {}, others=[proof(seed=7, stairs=stairs)])
    assert "With seed 7" not in told, "nothing falls short there"


def test_no_table_has_a_row_of_another_width(tmp_path):
    width = 0
    for line in page(tmp_path, {}).splitlines():
        if not line.startswith("|"):
            width = 0
            continue
        width = width or line.count("|")
        assert line.count("|") == width, line


def test_the_report_is_checked_against_the_data(files, capsys):
    rows.write(report.data_file(1), proof())
    assert report.main(check=True) == 1
    assert "python benchmarks/proof --report" in capsys.readouterr().err
    assert not (files / "proof.md").exists(), "to check writes nothing"
    assert report.main(check=False) == 0
    assert report.main(check=True) == 0
    (files / "images" / "proof-misses.svg").write_text("another")
    assert report.main(check=True) == 1


def test_without_data_the_page_says_so(files):
    assert report.main(check=False) == 0
    assert report.NOT_RUN in (files / "proof.md").read_text()


def test_seeds_have_files_of_their_own():
    assert report.data_file(1).name == "proof.json"
    assert report.data_file(7).name == "proof-seed-7.json"


@pytest.mark.parametrize("draw", [plots.shares, plots.misses, plots.device_time, plots.timelines])
def test_pictures_are_drawn_for_both_themes(draw):
    text = draw(proof())
    root = ET.fromstring(text)  # noqa: S314 - our own
    assert "prefers-color-scheme: dark" in text
    width, height = (float(value) for value in root.attrib["viewBox"].split()[2:])
    for line in root.iter("{http://www.w3.org/2000/svg}polyline"):
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= width
            assert 0 <= y <= height


def test_a_picture_is_the_same_every_time():
    assert plots.misses(proof()) == plots.misses(proof())
