import pytest

from carpool.generation.profiles import EngineProfile, Linear
from carpool.generation.requests import Slo
from carpool_cli.streams.loads import Lengths
from carpool_cli.streams.options import Asked, StreamLoad
from carpool_cli.streams.twin import StreamTwin, show

PROFILE = EngineProfile(name="test", source="made up", kv_tokens=400_000, step=Linear(0.01, 0.0, 1e-7, 5e-5))
SLO = Slo(2.0, 0.05)


def twin(rate, lengths=(1000, 101), seconds=20.0, **changes):
    profile = EngineProfile(name="test", source="made up", kv_tokens=400_000, step=PROFILE.step, **changes)
    return StreamTwin(Asked(profile, SLO, StreamLoad(Lengths([lengths], "alike"), seconds, 0, rate, 1.0, None)), rate)


def test_a_calm_engine_answers_all_by_any_rule_at_the_pace_of_its_steps():
    played = twin(0.5)
    for each in (played.gate(), played.no_gate(), played.cap(16), played.limited(16, 10_000, 2048)):
        assert (each.good_share, each.refused_share, each.preemptions) == (1.0, 0.0, 0)
        # 10 ms, the cache of one or two, and now and then a prompt of 50 ms.
        assert each.tpot_p50 == pytest.approx(0.0105, rel=0.1)
        assert each.ttft_p50 == pytest.approx(0.06, rel=0.3)


def test_the_engine_s_own_limits_bound_what_it_runs_and_what_waits():
    played = twin(40.0)
    few, many = played.limited(4, 20_000, 2048), played.limited(200, 20_000, 2048)
    assert few.tpot_p99 < many.tpot_p99
    assert few.refused_share > many.refused_share
    assert played.limited(4, 2_000, 2048).ttft_p99 < few.ttft_p99


def test_a_missed_target_is_marked(capsys):
    found = twin(40.0).no_gate()
    show([found], SLO)
    shown = capsys.readouterr().out
    assert "no gate" in shown
    assert (" !" in shown) == (found.ttft_p99 > SLO.ttft or found.tpot_p99 > SLO.tpot)
    assert found.ttft_p99 > SLO.ttft
