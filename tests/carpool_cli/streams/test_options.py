import click
import pytest

from carpool_cli.streams.loads import Lengths
from carpool_cli.streams.options import StreamLoad


def load(**changes):
    given = StreamLoad(Lengths([(100, 10)], "always the same"), 100.0, 0, 5.0, 1.0, None)
    return given._replace(**changes)


def test_times_have_the_rate_and_end_in_time():
    times = load().times(5.0)
    assert len(times) == pytest.approx(500, rel=0.2)
    assert times == sorted(times)
    assert times[-1] < 100.0
    assert times == load().times(5.0)
    assert times != load(seed=1).times(5.0)


def test_a_trace_is_played_at_its_own_pace_or_at_a_rate():
    recorded = [50.0 + 2 * i for i in range(1000)]
    given = load(recorded=recorded, rate=None)
    assert given.times(None)[:3] == [0.0, 2.0, 4.0]
    assert len(given.times(None)) == 50
    assert len(given.times(4.0)) == pytest.approx(400, abs=1)
    assert given.described(None) == "always the same at its own pace"


def test_a_load_without_a_request_or_with_millions_is_refused():
    with pytest.raises(click.ClickException, match="no request comes"):
        load().times(1e-6)
    with pytest.raises(click.ClickException, match="lower --rate"):
        load().times(1e9)
