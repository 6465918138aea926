from __future__ import annotations

from msgspec.structs import replace

from carpool.batching.model_state import ModelState
from carpool.batching.requests import Batch, Estimate, Request, time_of
from carpool.policy.parameters import Parameters


def test_beyond_the_table_time_goes_on_along_its_last_step() -> None:
    table = (0.0, 1.0, 1.5, 2.5)
    assert [time_of(table, rows) for rows in (1, 3, 4, 6)] == [1.0, 2.5, 3.5, 5.5]


def test_a_table_of_one_size_is_proportional() -> None:
    assert time_of((0.0, 2.0), 3) == 6.0


def test_time_never_falls_beyond_the_table() -> None:
    assert time_of((0.0, 2.0, 1.0), 9) == 1.0


def test_sizes_above_those_measured_take_no_longer_where_none_of_them_could_be_in_time() -> None:
    line = Estimate((0.0, 0.033, 0.0495, 0.066), (0.0, 0.034, 0.068, 0.102))
    flat = line.flat_beyond(1, target=0.0435)
    assert flat.times == (0.0, 0.033, 0.034, 0.034)
    assert flat.upper == line.upper
    # Two rows would be in time, so that such batches come about, and are measured.
    assert line.flat_beyond(1, target=0.05) == line
    assert line.flat_beyond(3, target=0.01) == line, "all of the table was measured"
    assert replace(line, buckets={4: line}).flat_beyond(1, 0.0435).buckets[4] == flat


def test_only_an_entire_request_alone_is_whole() -> None:
    state = ModelState("m", Parameters())
    one, two = (Request(key="k", arrived=0.0, due=1.0, rows=4) for _ in range(2))
    assert Batch(state, "k", 0, [(one, 0, 4)], 4).whole
    assert not Batch(state, "k", 0, [(one, 0, 3)], 3).whole
    assert not Batch(state, "k", 0, [(one, 1, 3)], 2).whole
    assert not Batch(state, "k", 0, [(one, 0, 4), (two, 0, 4)], 8).whole
    assert Batch(state, "k", 0, [], 0).model == "m"
