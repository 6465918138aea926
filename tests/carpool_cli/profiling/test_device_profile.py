from __future__ import annotations

import json
from pathlib import Path

import click
import pytest

from carpool_cli.profiling.device_profile import load, save
from carpool_cli.profiling.inflection import inflection

SHIPPED = sorted((Path(__file__).parents[3] / "benchmarks" / "profiles").glob("*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_profile_shipped_names_its_source(path):
    profile = load(path)
    assert len(profile.source) > 20
    curve = profile.service_time()
    assert [curve.time(rows) for rows in profile.rows] == list(profile.seconds)


def test_there_is_one_that_does_not_gain_and_one_that_does():
    curves = {path.stem: load(path).service_time() for path in SHIPPED}
    assert inflection(curves["magika-cpu"]) == 1
    assert inflection(curves["ranking-tower-cpu"]) > 32


def test_what_is_saved_loads_equal(tmp_path):
    profile = load(SHIPPED[0])
    save(profile, tmp_path / "p.json")
    assert load(tmp_path / "p.json") == profile


GOOD = {"name": "a", "source": "synthetic", "rows": [1, 2], "seconds": [0.1, 0.2]}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seconds": [0.1]}, "2 rows but 1 seconds"),
        ({"rows": [2, 1]}, "rows must ascend"),
        ({"seconds": [0.1, -1]}, "$.seconds"),
        ({"executors": 0}, "$.executors"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_bad_profile_names_the_field(change, says, tmp_path):
    path = tmp_path / "p.json"
    path.write_text(json.dumps(GOOD | change))
    with pytest.raises(click.ClickException) as raised:
        load(path)
    assert says in raised.value.message
    assert str(path) in raised.value.message


def test_what_is_not_json_or_not_there_says_so(tmp_path):
    (tmp_path / "p.json").write_text("{")
    with pytest.raises(click.ClickException, match="carpool profile"):
        load(tmp_path / "p.json")
    with pytest.raises(click.ClickException, match="No such file"):
        load(tmp_path / "q.json")


def test_the_profile_of_an_engine_is_named_as_that(tmp_path):
    (tmp_path / "p.json").write_text('{"name": "8b", "source": "", "kvTokens": 1000, "step": {}}')
    takes = "`carpool recommend --generative` and `carpool simulate --generative` take it"
    with pytest.raises(click.ClickException, match=f"that is an engine's profile, for token streams; {takes}$"):
        load(tmp_path / "p.json")
