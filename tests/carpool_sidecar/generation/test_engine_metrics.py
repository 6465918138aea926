from __future__ import annotations

import pytest

from carpool.exchange.token_streams import EngineSays
from carpool_sidecar.backends.base import Document
from carpool_sidecar.generation.engine_metrics import INTERVAL, LONGEST, UNKNOWN, EngineMetrics, parse

VLLM = b"""\
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m 1"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m 1"} 0.5
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_preemptions_total{engine="0",model_name="m"} 2.0
vllm:num_preemptions_created{engine="0",model_name="m"} 1.76e+09
vllm:num_requests_waiting_by_reason{engine="0"} 7
"""


def test_what_engines_say():
    assert parse(VLLM) == EngineSays(kv_share=0.5, running=7.0, waiting=0.0, preemptions=2.0)
    llama = (
        b"llamacpp:n_busy_slots_per_decode 3.5\nllamacpp:requests_processing 2\nllamacpp:kv_cache_usage_ratio 1e-1\n"
    )
    assert parse(llama) == EngineSays(busy_slots=3.5, running=2.0, kv_share=0.1)
    assert parse(b'sglang:token_usage{a="b"} 0.3\ntgi_queue_size 4\n') == EngineSays(kv_share=0.3, waiting=4.0)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        (b'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000",num_cpu_blocks="9"} 1.0\n', 16_000),
        (b'vllm:cache_config_info{block_size="16",kv_cache_size_tokens="8000",num_gpu_blocks="1000"} 1.0\n', 8000),
        (b'vllm:cache_config_info{block_size="16",num_gpu_blocks="10",engine="0"} 1.0\n' * 2, 320),
        (b'vllm:cache_config_info{hash_block_size="8",block_size="16",num_gpu_blocks="None"} 1.0\n', None),
        (b'vllm:cache_config_info{num_gpu_blocks_override="7"} 1.0\n', None),
        (b'sglang:max_total_num_tokens{model_name="m"} 373883.0\n', 373_883),
        (b"sglang:max_total_num_tokens 373883.0\nsglang:max_total_num_tokens e.e\n", 373_883),
        (
            b"".join(b'sglang:max_total_num_tokens{dp_rank="%d",tp_rank="%d"} 100\n' % (n // 2, n) for n in range(4)),
            200,
        ),
    ],
)
def test_the_size_of_the_cache(text, tokens):
    said = parse(text + b"vllm:num_requests_running 1\n")
    assert said == EngineSays(running=1.0, kv_tokens=tokens)


@pytest.mark.parametrize("text", [b"", b"up 1\n", b"# vllm:num_requests_running 3", b"vllm:num_requests_running e-e\n"])
def test_what_says_nothing(text):
    assert parse(text) is None


class Server:
    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    async def ask(self, target):
        self.asked.append(target)
        return self.answers.pop(0)


async def test_the_size_of_the_cache_is_learned_while_requests_are_under_way(chat):
    streams = await chat.start(policy={"slo": {"ttft": {"p99": "20s"}}})
    full = b"vllm:kv_cache_usage_perc 0.5\n"
    server = Server(Document(200, full), Document(404), Document(200, full + b"#" * LONGEST))
    watch = EngineMetrics(server, streams)
    assert await watch.look() == INTERVAL
    assert server.asked == []  # nothing is under way
    reader = chat.ask(prompt="a" * 4000)
    call = await chat.called(1)
    call.token()
    await chat.until(lambda: reader.body == call.sent)
    held = streams.gatekeeper.gate.meter.kv
    assert await watch.look() == INTERVAL
    assert streams.engine == EngineSays(kv_share=0.5)
    assert streams.gatekeeper.gate.kv.tokens == pytest.approx(2 * held)
    assert [await watch.look(), await watch.look(), server.asked] == [UNKNOWN, UNKNOWN, [b"/metrics"] * 3]
    assert streams.engine is None


async def test_the_size_of_the_cache_is_known_before_it_fills(chat):
    streams = await chat.start(policy={"slo": {"ttft": {"p99": "20s"}}})
    info = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1.0\n'
    watch = EngineMetrics(Server(Document(200, info + b"vllm:kv_cache_usage_perc 0.001\n")), streams)
    chat.ask(prompt="a" * 40)
    await chat.called(1)
    assert await watch.look() == INTERVAL
    assert streams.gatekeeper.gate.kv.tokens == 16_000


async def test_a_size_that_is_set_stands(chat):
    policy = {"slo": {"ttft": {"p99": "20s"}}, "generation": {"kvTokens": 500}}
    streams = await chat.start(policy=policy)
    info = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1.0\n'
    watch = EngineMetrics(Server(Document(200, info)), streams)
    chat.ask(prompt="a" * 40)
    await chat.called(1)
    assert await watch.look() == INTERVAL
    assert streams.gatekeeper.gate.kv.tokens == 500
