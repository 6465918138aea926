from __future__ import annotations

import threading
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from carpool_sidecar.admin.metrics import METRICS, PREFIX, Exposition, reference

REFERENCE = Path(__file__).parents[3] / "docs/reference/metrics.md"


def test_the_reference_page_begins_with_what_the_code_says():
    assert REFERENCE.read_text("utf-8").startswith(reference()), "run: make docs"


async def test_a_scrape_has_every_metric_and_its_numbers_agree(world):
    sidecar, client = await world.start(policy={"admission": {"maxQueuedRows": 4}})
    await client.predict(b"9")
    first, rest = await world.queue_behind(sidecar, client, [b"1", b"2", b"3,4"])
    assert (await client.predict(b"5")).status == 429
    rest[0].leave()
    await world.until(lambda: sidecar.batcher.queued_rows == 3)
    exposition = Exposition(sidecar)
    waiting = await _read(exposition)
    assert (waiting["queue_rows"][()], waiting["in_flight_batches"][()]) == (3, 1)
    bodies = [b'{"instances":[%b]}' % text for text in (b"0", b"2", b"3,4")]
    assert waiting["buffered_bytes"][()] == sum(map(len, bodies))
    world.model.release()
    for one in (first, *rest[1:]):
        assert (await one).status == 200
    seen = await _read(exposition)
    assert {metric.name for metric in METRICS} <= seen.keys() | {"key_fragments", "alone", "tuner_decisions"}
    m = (("model", "m"),)
    assert seen["arrivals"][m] == 6
    assert seen["rows"][m] == 7
    assert seen["request_rows"][m] == 6
    assert seen["batchable"][m] == 6, "all have one key"
    assert seen["forecast_alarm"][m] == 0
    assert seen["slo_hits"][m] == 4
    ((quantile, due),) = seen["slo_target_seconds"].items()
    assert (quantile, due) == ((("quantile", "0.99"),), sidecar.driver.terms.due)
    assert seen["slo_allowed_misses_ratio"][()] == 0.01
    assert seen["refused"][(("model", "m"), ("reason", "queue-full"))] == 1
    assert seen["cancelled"][m] == 1
    assert seen["request_duration_seconds"][m] == 4
    assert seen["batch_size"][m] == 3
    assert seen["requests"][(("code", "429"), ("model", "m"), ("protocol", "v1"))] == 1
    assert seen["mode"][(("mode", "batching"), ("model", "m"))] == 1
    assert seen["max_batch"][m] == 8
    assert seen["model_ready"][()] == 1
    assert seen["buffered_bytes"][()] == 0


async def test_sizes_that_callers_choose_do_not_add_up(world):
    sidecar, client = await world.start(policy={"models": [{"name": "m", "axis": "None"}]}, limits={"maxRows": 16384})
    for rows in (1, 2, 3, 4, 100, 101, 5000, 9000):
        assert (await client.predict(b",".join([b"1"] * rows))).status == 200
    text = (await Exposition(sidecar).text()).decode()
    for bound, count in (("1", 1), ("2", 2), ("4", 4), ("128", 6), ("4096", 6), ("+Inf", 8)):
        assert f'carpool_batch_size_bucket{{le="{bound}",model="m"}} {count}.0' in text
    assert 'carpool_batch_size_sum{model="m"} 14211.0' in text
    assert len(sidecar.driver.counts.batch_sizes) == 6
    for bound, count in (("1", 1), ("2", 2), ("4", 4), ("64", 4), ("128", 6), ("8192", 7), ("16384", 8), ("+Inf", 8)):
        assert f'carpool_request_rows_bucket{{le="{bound}",model="m"}} {count}.0' in text
    assert 'carpool_request_rows_sum{model="m"} 14211.0' in text


async def test_text_is_written_beside_the_loop(world):
    sidecar, client = await world.start()
    await client.predict(b"1")
    exposition, threads = Exposition(sidecar), []
    write = exposition._generate
    exposition._generate = lambda registry: (threads.append(threading.get_ident()), write(registry))[1]
    assert b"carpool_arrivals_total" in await exposition.text()
    assert threads[0] != threading.get_ident()


async def test_sizes_of_batches_are_each_models_own(world):
    sidecar, client = await world.start()
    await client.predict(b"1")
    sidecar.batcher.model("other")
    sidecar.driver.counts.batch_sizes |= {("other", 2): 5}
    text = (await Exposition(sidecar).text()).decode()
    assert 'carpool_batch_size_bucket{le="4",model="other"} 5.0' in text
    assert 'carpool_batch_size_bucket{le="4",model="m"} 1.0' in text


async def _read(exposition):
    """By metric and labels: the value; of histograms and summaries the count."""
    found = {}
    for family in text_string_to_metric_families((await exposition.text()).decode()):
        if family.name.startswith(PREFIX):
            samples = found.setdefault(family.name.removeprefix(PREFIX), {})
            for sample in family.samples:
                if not sample.name.endswith(("_bucket", "_sum", "_created")):
                    samples[tuple(sorted(sample.labels.items()))] = sample.value
    return found
