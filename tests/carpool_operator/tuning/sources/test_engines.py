from __future__ import annotations

import re
import sys
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

sys.path.append(str(Path(__file__).parents[1]))
from vllm import PROFILE, SLO, scrapes, stored, stored_by_sglang

from carpool.generation.observed import ObservedEngine
from carpool_operator.api.spec import Prometheus as Settings
from carpool_operator.tuning.sources.endpoint import endpoint
from carpool_operator.tuning.sources.engines import READ, counters, question
from carpool_operator.tuning.sources.prometheus import Prometheus, open_session
from carpool_operator.tuning.sources.scrapes import POD_MONITOR, Series


def read(series):
    return counters(msgspec.convert(series, list[Series]), POD_MONITOR)


@pytest.fixture(scope="module")
def scraped():
    return scrapes([0.5])


def test_the_newest_scrape_is_read(scraped):
    assert read(stored("llama-0", scraped)) == {
        "llama-0": scraped[-1]._replace(kv_size=float(PROFILE.kv_tokens // 16 * 16))
    }


def test_older_names_are_read_too(scraped):
    names = {"gaps": "vllm:time_per_output_token_seconds", "kv": "vllm:gpu_cache_usage_perc"}
    assert read(stored("llama-0", scraped, **names)) == read(stored("llama-0", scraped))


def test_engines_behind_one_port_are_added_up(scraped):
    both = read([*stored("llama-0", scraped), *stored("llama-0", scraped, engine="1")])["llama-0"]
    assert (both.requests, both.kv_size) == (2 * scraped[-1].requests, 2.0 * (PROFILE.kv_tokens // 16 * 16))
    assert both.kv_share == scraped[-1].kv_share


def test_prompts_that_the_cache_had_are_no_work(scraped):
    cached = {"metric": {"__name__": "vllm:prefix_cache_hits_total", "pod": "llama-0"},
              "values": [[scraped[-1].at, "100"]]}  # fmt: skip
    found = read([*stored("llama-0", scraped), cached])["llama-0"]
    assert found.prompt_tokens == scraped[-1].prompt_tokens - 100


def test_sglang_is_read_by_its_own_names(scraped):
    found = read(stored_by_sglang("llama-0", scraped))["llama-0"]
    last = scraped[-1]
    assert found == last._replace(
        prompt_tokens=last.request_prompt_tokens, steps=None, kv_size=float(PROFILE.kv_tokens), preemptions=0.0
    )
    cached = {"metric": {"__name__": "sglang:cached_tokens_total", "pod": "llama-0", "cache_source": "device"},
              "values": [[last.at, "100"]]}  # fmt: skip
    fewer = read([*stored_by_sglang("llama-0", scraped), cached])["llama-0"]
    assert fewer.prompt_tokens == found.prompt_tokens - 100
    lacking = [each for each in stored_by_sglang("p", scraped) if "inter_token" not in each["metric"]["__name__"]]
    assert read(lacking)["p"].startswith("it has no sglang:inter_token_latency_seconds: is it SGLang")


def test_what_sglang_shows_leads_to_limits_as_vllms_metrics_do():
    every = scrapes([0.3, 0.6, 0.9, 0.6])
    limits = []
    for said in (stored, stored_by_sglang):
        engine = ObservedEngine()
        found = [read(said("p", [each]))["p"] for each in every]
        for before, after in pairwise(found):
            engine.observe(before, after)
        limits.append(engine.advice(SLO).sequences)
    assert limits[1] == pytest.approx(limits[0], rel=0.15)


def test_what_an_engine_lacks_is_named(scraped):
    assert (
        "vllm:request_prompt_tokens_sum"
        in read([each for each in stored("p", scraped) if "request_prompt" not in each["metric"]["__name__"]])["p"]
    )
    assert (
        "vllm:inter_token_latency_seconds"
        in read([each for each in stored("p", scraped) if "inter_token" not in each["metric"]["__name__"]])["p"]
    )
    assert "is it vLLM" in read([{"metric": {"__name__": "vllm:num_requests_running", "pod": "p"},
                                  "values": [[1.0, "NaN"]]}])["p"]  # fmt: skip


def test_series_of_another_process_end_earlier_and_are_left(scraped):
    old = stored("llama-0", scraped[:-1], engine="7")
    assert read([*old, *stored("llama-0", scraped)]) == read(stored("llama-0", scraped))


async def test_prometheus_is_asked_for_them_and_errors_are_each_pods(scraped):
    asked, answers = [], [stored("llama-0", scraped), None]

    async def answer(request):
        asked.append((await request.post())["query"])
        found = answers.pop(0)
        if found is None:
            return web.json_response({"status": "error", "errorType": "internal", "error": "no"}, status=500)
        return web.json_response({"status": "success", "data": {"resultType": "matrix", "result": found}})

    app = web.Application()
    app.router.add_post("/api/v1/query", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with open_session() as session:
        source = Prometheus(endpoint(Settings(url=url), {}), session, stale_after=60.0)
        found = await source.engines("shop", ["llama-0", "llama-1"], 0.0)
        assert found["llama-0"].requests == scraped[-1].requests
        assert "no metrics of vLLM" in found["llama-1"]
        assert asked == [question(POD_MONITOR, "shop", ["llama-0", "llama-1"], 60.0)]
        assert asked[0].startswith('{__name__=~"vllm:prompt_tokens_total|')
        assert asked[0].endswith("}[60000ms]")
        failed = await source.engines("shop", ["llama-0"], 0.0)
        assert "500" in failed["llama-0"]
    await runner.cleanup()


def recorded(moment):
    """What a Prometheus stores of the metrics that a real vLLM 0.32 gave."""
    folder = Path(__file__).parents[3] / "carpool_sidecar" / "generation" / "recorded" / "vllm"
    lines = re.findall(
        r"^(vllm:\w+)\{([^\n]*)\} (\S+)$", (folder / f"metrics-{moment}.response").read_text(), re.MULTILINE
    )
    return [
        {
            "metric": {"__name__": name, POD_MONITOR.pod: "llama-0", **dict(re.findall(r'(\w+)="([^"]*)"', labels))},
            "values": [(100.0, value)],
        }
        for name, labels, value in lines
        if name in READ
    ]


def test_a_real_vllm_is_read():
    idle, busy, after = (read(recorded(moment))["llama-0"] for moment in ("idle", "busy", "after"))
    assert (busy.running, busy.waiting, after.running, after.waiting) == (2, 2, 0, 0)
    assert after.kv_size == 8192 * 128  # blocks, and tokens of each
    assert 0 < busy.kv_share < 1
    assert idle.requests == busy.requests < after.requests
    for one, other in ((idle, busy), (busy, after)):
        assert one.gaps <= other.gaps
        assert one.steps <= other.steps
        assert one.request_output_tokens <= other.request_output_tokens
    assert 0 < after.steps <= after.gaps + after.requests
    assert 0 < after.gap_seconds / after.gaps < 1
    assert after.preemptions == 0
