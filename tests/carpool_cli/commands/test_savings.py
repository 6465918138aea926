from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest

from carpool.exchange.report import Stalls
from carpool.learning.latency_model import ServiceTime
from carpool.policy.parameters import Parameters
from carpool_cli.commands.savings import of_running
from carpool_cli.live import admin_client, running
from carpool_cli.live.running import Running
from carpool_cli.planning import history, prometheus
from carpool_cli.planning.assumptions import for_p99
from carpool_cli.planning.savings import Counted, Stretch, situation_of


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"name": "reference", "source": "s", "rows": [1, 16], "seconds": [0.0055, 0.013]}))
    return path


def test_a_profile_and_a_load_become_replicas_and_money(carpool, profile):
    asked = ("savings", "--profile", profile, "--slo-p99", "50ms", "--rate", 1500, "--gpu-hour", "2.50")
    shown = carpool(*asked)
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    assert "beyond zero wait" in lines[1]
    assert lines[2].startswith("no batching")
    assert lines[3].startswith("zero wait")
    assert lines[3].rstrip().endswith("-")
    document = json.loads(carpool(*asked, "--json").output)
    (workload,) = document["workloads"]
    zero = next(way for way in workload["ways"] if way["name"] == "zero wait")
    assert zero["money"] == pytest.approx(zero["replicas"] * 2.5 * 730)
    assert document["total"][1]["deviceSeconds"] == zero["deviceSeconds"]


def test_every_way_is_drawn(carpool, profile, tmp_path):
    asked = ("savings", "--profile", profile, "--slo-p99", "50ms", "--rate", 1500, "--gpu-hour", "2.50")
    result = carpool(*asked, "--plot", tmp_path / "saved.png")
    assert result.exit_code == 0, result.output
    assert "drew" in result.output
    assert "a setting that Carpool chose is for this load" in result.output
    assert (tmp_path / "saved.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "name sidecars"),
        (("--profile", "p.json", ":9090"), "one of the three"),
        (("--prometheus", "http://p:9090", ":9090"), "one of the three"),
        (
            ("--profile", "p.json", "--slo-p99", "50ms", "--rate", "10", "--pods", "3"),
            "--pods goes with running sidecars",
        ),
        (("--prometheus", "http://p:9090", "--rate", "5"), "Prometheus has the load"),
        (("--prometheus", "p:9090"), "not a server's base URL"),
        (("--prometheus", "http://[::1"), "not a server's base URL"),
        (("--prometheus", "http://127.0.0.1:9"), "by kubectl port-forward"),
        (("--prometheus", "http://p:9090", "--since", "yesterday"), "12h or 7d"),
        ((":9090", "--rate", "5"), "--rate goes with --profile: a sidecar brings its own"),
        ((":9090", "--cv", "1"), "--cv goes with --profile: a sidecar brings its own"),
        ((":9090", "--objective", "efficiency"), "--objective goes with --profile and --prometheus"),
        ((":9090", "--target-utilization", "70"), "--target-utilization goes with --profile and --prometheus"),
        ((":9090", "--since", "1h"), "--since goes with --prometheus"),
        (("--profile", "p.json", "--select", 'a="b"'), "--select goes with --prometheus"),
        (("--profile", "p.json", "--key-file", "k"), "--key-file goes with running sidecars"),
        (("--prometheus", "http://p:9090", "--workload", "shop/Deployment/a"), "--workload goes with running sidecars"),
        (("--profile", "p.json"), "--slo-p99"),
        (("--profile", "p.json", "--slo-p99", "0s"), "'--slo-p99': '0s': has to be longer than 0s"),
    ],
)
def test_what_is_missing_is_named(carpool, options, words):
    result = carpool("savings", *options)
    assert result.exit_code != 0
    assert words in result.output


def test_a_trace_has_its_own_burstiness(carpool, profile):
    asked = ("savings", "--profile", profile, "--slo-p99", "50ms", "--trace", "t.txt", "--cv", 2)
    result = carpool(*asked)
    assert result.exit_code == 2
    assert "--cv does not go with --trace, which brings its own" in result.output


def test_an_slo_that_one_request_alone_misses_is_named(carpool, profile):
    result = carpool("savings", "--profile", profile, "--slo-p99", "5ms", "--rate", 100)
    assert result.exit_code == 1
    assert "no rate meets an SLO of 5ms" in result.output
    assert "a request takes 5.5ms by itself" in result.output


def test_a_wait_by_hand_that_makes_every_request_late_is_named(carpool, profile):
    asked = ("savings", "--profile", profile, "--slo-p99", "50ms", "--rate", 100)
    result = carpool(*asked, "--max-wait", "80ms")
    assert result.exit_code == 1
    assert "a wait of 80ms set by hand is not below the SLO of 50ms" in result.output


def test_a_picture_of_a_kind_that_nobody_draws_is_refused_before_anything_is_played(carpool, profile, tmp_path):
    result = carpool(
        "savings", "--profile", profile, "--slo-p99", "50ms", "--rate", 1, "--plot", tmp_path / "saved.txt"
    )
    assert result.exit_code == 2
    assert "end it with .png, .svg, .pdf" in result.output


def test_a_load_is_needed(carpool, profile):
    result = carpool("savings", "--profile", profile, "--slo-p99", "50ms")
    assert "--rate" in result.output
    assert result.exit_code != 0


def test_running_sidecars_bring_their_load_and_what_is_in_force(launched, echo, carpool):
    # An SLO that three pods meet even as slow as a loaded machine makes them: more would be counted for them otherwise.
    # And a setting that stays: a tuner may be on its way to another one.
    fixed = ("--fixed", "--max-batch", 8, "--max-wait", "0s")
    with launched("--upstream", echo, "--slo-p99", "200ms", *fixed) as up:
        nobody = carpool("savings", up.admin)
        assert nobody.exit_code == 1
        assert "no request that could be batched has come" in nobody.output
        done = carpool("bench", up.data, "--rate", 200, "--requests", 400, "--warm-up", "0s")
        assert done.exit_code == 0, done.output
        document = json.loads(carpool("savings", up.admin, up.admin, "--pods", 3, "--json").output)
        one, other = document["workloads"]
        assert one["rate"] == pytest.approx(600, rel=0.25), "three pods"
        names = ["the pods that run", "no batching", "zero wait", "in force now", "Carpool at best"]
        assert [way["name"] for way in one["ways"]] == names
        assert document["total"][0]["replicas"] == 6
        total = {way["name"]: way["deviceSeconds"] for way in document["total"]}
        for way, same in zip(one["ways"], other["ways"], strict=True):
            assert total[way["name"]] == pytest.approx(way["deviceSeconds"] + same["deviceSeconds"])


def test_all_models_of_a_sidecar_are_compared_and_one_without_measurements_is_named(launched, echo, carpool):
    with launched("--upstream", echo, "--slo-p99", "50ms", "--axis", "another=First") as up:
        done = carpool("bench", up.data, "--rate", 200, "--requests", 200, "--warm-up", "0s")
        assert done.exit_code == 0, done.output
        for _ in range(3):
            ask = urllib.request.Request(f"{up.data}/v1/models/another:predict", b'{"instances": [[1.0]]}')  # noqa: S310
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(ask)  # noqa: S310 - our own process
            refused.value.close()
        shown = carpool("savings", up.admin)
        assert shown.exit_code == 0, shown.output
        assert "standin at" in shown.output
        assert "left out: batch latency of another is unknown" in shown.output


def running_model(model, slo, parameters):
    policy = for_p99(slo)
    return Running(
        address="http://127.0.0.1:9090",
        model=model,
        policy=policy,
        limits=policy.limits(),
        largest_safe=None,
        parameters=parameters,
        service=ServiceTime.measured({1: 0.0055, 16: 0.013}),
        arrivals=[(0.0025 * step, 1) for step in range(400)],
        p50=None,
        p99=None,
        stalls=Stalls(0, 0.0),
        decision=None,
        notes=["the last request came 2m ago: this is the load of that time"],
        since_last=1.0,
    )


def test_what_is_in_force_is_not_compared_when_the_load_has_stopped():
    # Without requests a sidecar passes through, which at 400/s would have missed the SLO
    loaded = running_model("m", 0.05, Parameters(pass_through=True))
    here, stopped = (of_running(each, None, None, None) for each in (loaded, loaded._replace(since_last=120.0)))
    assert [way.name for way in here.ways][2:] == ["in force now", "Carpool at best"]
    assert [way.name for way in stopped.ways][2:] == ["Carpool, Balanced", "Carpool at best"]
    assert "what is in force now is for no load, and is left out" in stopped.beware


class Client:
    def report(self):
        return None


@pytest.fixture
def sidecars(monkeypatch):
    """Sidecars with given models. A request takes 5.5 ms by itself."""
    models = {}
    monkeypatch.setattr(admin_client, "client_of", lambda *_: Client())
    monkeypatch.setattr(running, "asked_for", lambda _: list(models))
    monkeypatch.setattr(running, "read", lambda _, name: running_model(name, models[name], Parameters()))
    return models


def test_a_model_whose_slo_cant_be_met_hides_no_other_and_is_named(carpool, sidecars):
    sidecars.update({"tight": 0.004, "good": 0.05})
    shown = carpool("savings", ":9090")
    assert shown.exit_code == 0, shown.output
    assert "good at" in shown.output
    assert "left out: tight at http://127.0.0.1:9090: no rate meets an SLO of 4ms" in shown.output
    assert "--slo-p99" not in shown.output


def test_models_whose_slo_cant_be_met_are_all_named(carpool, sidecars):
    sidecars.update({"tight": 0.004, "tighter": 0.003})
    shown = carpool("savings", ":9090")
    assert shown.exit_code == 1
    assert "tight at http://127.0.0.1:9090: no rate meets" in shown.output
    assert "tighter at http://127.0.0.1:9090: no rate meets" in shown.output


def test_a_model_of_the_past_whose_slo_cant_be_met_hides_no_other_and_is_named(carpool, monkeypatch):
    def past(name, slo):
        found = running_model(name, slo, Parameters())
        counted = Counted(device_seconds=100.0, replicas=1.0, most_replicas=1)
        return history.Past(name, situation_of(found), found.policy, [Stretch(3600.0, 100.0)], counted)

    unknown = history.Unknown("shop/new", "no batch was measured in that time")
    found = [past("shop/tight", 0.004), unknown, past("shop/good", 0.05)]
    monkeypatch.setattr(prometheus, "held", lambda *_: history.Held(3600.0, 15.0))
    monkeypatch.setattr(prometheus, "ask", lambda *_: ({}, {}))
    monkeypatch.setattr(history, "pasts", lambda *_, **__: found)
    asked = ("savings", "--prometheus", "http://p:9090")
    shown = carpool(*asked)
    assert shown.exit_code == 0, shown.output
    assert "shop/good; 100.0 requests/s" in shown.output
    assert "\nleft out: shop/tight: no rate meets an SLO of 4ms" in shown.output
    assert "\nleft out: shop/new: no batch was measured" in shown.output
    document = json.loads(carpool(*asked, "--json").output)
    assert [one["name"] for one in document["workloads"]] == ["shop/good"]
    assert [each.split(":")[0] for each in document["leftOut"]] == ["shop/tight", "shop/new"]
    found.remove(unknown)
    found[-1] = unknown
    nothing = carpool(*asked)
    assert nothing.exit_code == 1
    assert "shop/tight: no rate meets" in nothing.output
    assert "shop/new: no batch was measured" in nothing.output
