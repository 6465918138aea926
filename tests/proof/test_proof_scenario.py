from __future__ import annotations

import json

import pytest
from proof import scenario as suite
from proof.scenario import ScenarioError, load, load_all, own_hash, suite_hash

from carpool.simulation.simulator import Noise

RIGHT = {
    "name": "one",
    "why": "an example",
    "profile": "synthetic-5-0.5",
    "slo": "50ms",
    "arrivals": {"process": "poisson"},
    "phases": [{"seconds": 120, "load": 0.5}],
}


def written(folder, **changes):
    path = folder / "one.json"
    path.write_text(json.dumps({**RIGHT, **changes}))
    return path


def test_the_suite_covers_the_required_kinds_of_scenarios():
    scenarios = load_all()
    assert len(scenarios) >= 32
    assert {1, 2, 4, 6, 8} <= {each.executors for each in scenarios}
    assert {1, 2, 8} <= {each.max_in_flight for each in scenarios}
    kinds = [each.arrivals for each in scenarios]
    assert {type(kind) for kind in kinds} == {suite.Poisson, suite.Gamma, suite.OnOff, suite.Diurnal, suite.Trace}
    assert {2, 4} <= {kind.cv for kind in kinds if isinstance(kind, suite.Gamma)}
    assert any(each.replicas > 1 for each in scenarios)
    assert any(each.slow_pod > 1 for each in scenarios)
    assert any(each.lengths for each in scenarios)
    assert any(each.cold > 1 for each in scenarios)
    assert any(each.stalls for each in scenarios)
    assert any(each.noise is Noise.LOGNORMAL for each in scenarios)
    phases = [each.phases for each in scenarios]
    assert any(after.load == 2 * before.load for before, after, *_ in (p for p in phases if len(p) > 1))
    assert any(after.load <= before.load / 4 for before, *_, after in (p for p in phases if len(p) > 1))
    assert any(phase.load > 1 for each in phases for phase in each)
    assert any(phase.device != 1 for each in phases for phase in each)
    promises = [float(each.slo) / each.service().time(1) for each in scenarios]
    assert min(promises) < 6
    assert max(promises) > 100


def test_every_profile_names_its_source():
    for each in load_all():
        source = suite.profile_of(each.profile).source
        assert any(word in source for word in ("github.com", "measured by this project", "synthetic")), each.profile


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"slo": 50}, "slo"),
        ({"slo": "fast"}, "slo"),
        ({"slo": "2ms"}, "slo: 2ms can't be kept by anybody: one row takes up to 5.5 ms"),
        ({"name": "two"}, "name"),
        ({"profile": "none"}, "profile: there is no none.json"),
        ({"arrivals": {"process": "weekly"}}, "arrivals"),
        ({"arrivals": {"process": "gamma"}}, "arrivals"),
        ({"arrivals": {"process": "gamma", "cv": -1}}, "arrivals.cv"),
        ({"phases": []}, "phases"),
        ({"phases": [{"seconds": 60, "load": 0.5}]}, "phases[0].seconds: 60 is less than 120"),
        ({"phases": [{"seconds": 120, "load": 0}]}, "phases[0].load"),
        ({"phases": [{"seconds": 120, "load": 1, "device": 2}]}, "phases[0].device"),
        ({"executors": 0}, "executors"),
        ({"maxInFlight": 100}, "maxInFlight"),
        ({"slowPod": 2}, "slowPod: needs a second replica"),
        ({"noise": "pink"}, "noise"),
        ({"stalls": {"every": "1s", "lasting": "1s"}}, "stalls.lasting"),
        ({"lengths": {"median": 90, "sigma": 1, "buckets": [128, 64], "reference": 64}}, "lengths.buckets"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_wrong_data_is_refused_by_the_fields_name(tmp_path, changes, said):
    with pytest.raises(ScenarioError, match=r"one\.json: ") as caught:
        load(written(tmp_path, **changes))
    assert said in str(caught.value)


def test_what_is_no_json_is_refused(tmp_path):
    path = tmp_path / "one.json"
    path.write_text("{")
    with pytest.raises(ScenarioError, match=r"one\.json"):
        load(path)


def test_the_suites_hash_changes_with_scenarios_and_profiles(tmp_path, monkeypatch):
    for folder in (suite.SCENARIOS, suite.PROFILES):
        (tmp_path / folder.name).mkdir()
    profile = tmp_path / "profiles" / "synthetic-5-0.5.json"
    profile.write_bytes((suite.PROFILES / profile.name).read_bytes())
    monkeypatch.setattr(suite, "SCENARIOS", tmp_path / "scenarios")
    monkeypatch.setattr(suite, "PROFILES", tmp_path / "profiles")
    path = written(suite.SCENARIOS)
    seen, own = [suite_hash()], [own_hash(load(path))]
    written(suite.SCENARIOS, slo="60ms")
    seen.append(suite_hash())
    own.append(own_hash(load(path)))
    profile.write_text(profile.read_text().replace("0.133", "0.134"))
    seen.append(suite_hash())
    own.append(own_hash(load(path)))
    (suite.SCENARIOS / "two.json").write_text("{}")
    seen.append(suite_hash())
    assert len(set(seen)) == 4
    assert len(set(own)) == 3
    assert own_hash(load(path)) == own[-1]
    written(suite.SCENARIOS, slo="60ms", why="in other words")
    assert own_hash(load(path)) == own[-1]
    assert suite_hash() == seen[-1]


def test_lengths_cost_what_as_many_rows_of_the_profile_do():
    lengths = suite.Lengths(median=100, sigma=0.8, buckets=(64, 128, 512), reference=128)
    assert [lengths.bucket(length) for length in (1, 64, 65, 128, 129, 9999)] == [64, 64, 128, 128, 512, 512]
    assert [lengths.rows(rows, bucket) for rows, bucket in ((1, 64), (2, 64), (3, 64), (3, 512))] == [1, 1, 2, 12]
    shares = lengths.shares()
    assert sum(shares.values()) == pytest.approx(1)
    # ln(128.5 / 100) / 0.8 = 0.31 standard deviations: 62 % are shorter.
    assert shares[64] + shares[128] == pytest.approx(0.623, abs=0.001)


def test_the_true_curve_of_the_mix_is_the_mean_over_its_buckets(tmp_path):
    lengths = {"median": 128, "sigma": 0.01, "buckets": [64, 128, 256], "reference": 128}
    service = load(written(tmp_path, lengths=lengths)).service()
    # Half are a little shorter than 128.5, half a little longer: ln(128.5 / 128) / 0.01 = 0.39, so 65 % and 35 %.
    share = 0.6516
    assert service.time(10) == pytest.approx(share * 0.010 + (1 - share) * 0.015, rel=1e-3)
    assert service.largest_measured == 64
