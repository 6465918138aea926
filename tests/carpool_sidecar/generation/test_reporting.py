"""What people see of token streams: metrics, and the report that the command line shows."""

from __future__ import annotations

from carpool.exchange.report import decode
from carpool.exchange.token_streams import quantile

TARGETS = {"ttft": {"p99": "20s"}, "tpot": {"p99": "10s"}}


async def scraped(chat):
    admin = chat.world.client(chat.sidecar.admin.address)
    lines = (await admin.get(b"/metrics")).body.decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


async def report(chat):
    admin = chat.world.client(chat.sidecar.admin.address)
    return decode((await admin.get(b"/v1/stats")).body).token_streams


async def test_streams_are_counted_while_they_run_and_when_they_end(chat):
    await chat.start(policy={"slo": TARGETS, "generation": {"maxRunning": 1}})
    first = chat.ask(prompt="a" * 400)
    call = await chat.called(1)
    chat.ask()
    await chat.until(lambda: chat.sidecar.streams.gatekeeper.queued == 1)
    call.token().token()
    await chat.until(lambda: first.body == call.sent)
    found = await scraped(chat)
    running = [found[f"carpool_{name}"] for name in ("generation_running", "generation_queued", "generation_gated")]
    assert running == ["1.0", "1.0", "1.0"]
    assert float(found["carpool_kv_tokens"]) > 100
    assert found['carpool_generation_target_seconds{target="tpot"}'] == "10.0"
    call.finish(prompt_tokens=90)
    await first
    (await chat.called(2)).token().finish("length")
    await chat.until(lambda: not chat.sidecar.streams.under_way)
    found = await scraped(chat)
    assert found['carpool_generation_requests_total{end="stop",model="m"}'] == "1.0"
    assert found['carpool_generation_requests_total{end="length",model="m"}'] == "1.0"
    counts = [
        found[f'carpool_time_{name}_seconds_count{{model="m"}}'] for name in ("to_first_token", "per_output_token")
    ]
    assert counts == ["2.0", "1.0"]
    assert found['carpool_output_tokens_total{model="m"}'] == "3.0"
    assert found['carpool_generation_slo_hits_total{model="m"}'] == "2.0"
    assert found['carpool_requests_total{code="200",model="",protocol="generation"}'] == "2.0"
    seen = await report(chat)
    assert (seen.running, seen.queued, seen.gate.ttft, seen.gate.tpot) == (0, 0, 20.0, 10.0)
    (model,) = seen.models
    assert (model.model, model.ends, model.hits) == ("m", {"stop": 1, "length": 1}, 2)
    assert sum(model.ttft) == 2


async def test_without_targets_streams_are_observed_all_the_same(chat):
    await chat.start()
    reader = chat.ask()
    (await chat.called(1)).token().finish()
    await reader
    seen = await report(chat)
    assert seen.gate is None
    assert seen.models[0].hits == 0
    assert (await scraped(chat))["carpool_generation_gated"] == "0.0"


def test_quantiles_of_durations():
    assert quantile([0] * 42, 0.5) is None
    counts = [0] * 42
    counts[10] = 100
    low, high = quantile(counts, 0.01), quantile(counts, 1.0)
    assert 0.0226 < low < high == 0.001 * 2**5
    counts[41] = 1
    assert quantile(counts, 1.0) == 0.001 * 2**20
