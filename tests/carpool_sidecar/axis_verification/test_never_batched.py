"""Models that must not be merged, and models that must: with the defaults no caller gets another answer than alone."""

from __future__ import annotations

import model_functions
import numpy as np
import pytest

from carpool_sidecar.protocols.models import Axis

PROTOCOLS = ["v1", "v2", "binary"]


def entry_of(sidecar):
    (entry,) = sidecar.models
    return entry, *sidecar.driver.verifier.state(entry)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", model_functions.NEVER)
async def test_no_answer_depends_on_other_callers(served, load, compare, name, protocol):
    model = model_functions.NEVER[name]
    sidecar, client = await served(model)
    told = await load(client, protocol)
    assert [one for one in told if not compare(model, one)] == []
    assert all(one.batch == len(one.rows) for one in told)
    entry, state, why = entry_of(sidecar)
    if (name, protocol) == ("scalar", "v1"):
        assert (state, "can't be split by rows" in why) == ("unverified", True)
        assert sidecar.driver.counts.alone["m", "axis-unverified"] == len(told)
    else:
        assert (state, entry.alone, entry.alone_by_protocol) == ("refuted", "axis-refuted", "axis-refuted")
        assert sidecar.driver.counts.alone["m", "axis-refuted"] > 0
        assert sidecar.driver.verifier.trials.results["m", "disagreed"] == 1


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", model_functions.UNREPEATABLE)
async def test_a_model_whose_answers_can_t_be_repeated_is_never_merged(served, load, name, protocol):
    sidecar, client = await served(model_functions.UNREPEATABLE[name]())
    told = await load(client, protocol)
    assert all((one.answer.status, one.batch) == (200, len(one.rows)) for one in told)
    assert entry_of(sidecar)[1] == "refuted"


@pytest.mark.parametrize("name", model_functions.UNREPEATABLE)
async def test_nor_where_all_callers_send_the_same(served, load, name):
    sidecar, client = await served(model_functions.UNREPEATABLE[name]())
    told = await load(client, "v1", draw=lambda rng, rows: np.ones((2, 4), np.float32))
    assert all((one.answer.status, one.batch) == (200, 2) for one in told)
    assert entry_of(sidecar)[1] == "refuted"


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", model_functions.GOOD)
async def test_models_whose_rows_are_independent_are_merged(served, load, compare, name, protocol):
    model = model_functions.GOOD[name]
    sidecar, client = await served(model)
    told = await load(client, protocol)
    assert [one for one in told if not compare(model, one)] == []
    assert sum(one.batch > len(one.rows) for one in told) > len(told) / 3
    assert entry_of(sidecar)[1] == "verified"
    results = sidecar.driver.verifier.trials.results
    assert results["m", "agreed"] >= 2
    assert results.keys() == {("m", "agreed")}


async def test_a_file_without_a_batch_ends_checks_that_began_before_it_was_read(served, load):
    sidecar, client = await served(model_functions.GOOD["linear"])
    await load(client, "v1", callers=1, requests=1)
    entry, state, _ = entry_of(sidecar)
    assert (state, len(entry.record.checks)) == ("unverified", 1)
    entry.known.axis = Axis("None", None, "dim 0 of input 'x' is fixed to 1", by_file=True)
    entry.configure(None)
    assert entry_of(sidecar)[1] == "off"
