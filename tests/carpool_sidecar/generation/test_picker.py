"""What an endpoint picker reads on the data port."""

from __future__ import annotations

import pytest

from carpool_sidecar.generation.engine_metrics import parse
from carpool_sidecar.generation.picker import with_queue

VLLM = b"""\
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0"} 7
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
"""
TARGETS = {"slo": {"ttft": {"p99": "20s"}}, "generation": {"maxRunning": 1}}


def test_the_gates_queue_is_added_and_nothing_else_changes():
    expected = VLLM.replace(b'{engine="0",model_name="m"} 2.0', b'{engine="0",model_name="m"} 5.0', 1)
    assert with_queue(VLLM, 3, 4, 0.5) == expected
    assert parse(with_queue(VLLM, 3, 4, 0.5)).waiting == 5.0


@pytest.mark.parametrize(
    "line", [b'sglang:num_queue_reqs{a="b"} 1', b"tgi_queue_size 1", b"llamacpp:requests_deferred 1"]
)
def test_of_other_engines_too(line):
    assert parse(with_queue(line + b"\n", 3, 4, None)).waiting == 4.0


@pytest.mark.parametrize("text", [b"", b"up 1", b"process_cpu_seconds_total 3.5\n"])
def test_an_engine_without_such_metrics_gets_vllms(text):
    found = with_queue(text, 3, 4, 0.5)
    assert found.startswith(text)
    says = parse(found)
    assert (says.waiting, says.running, says.kv_share) == (3.0, 4.0, 0.5)
    assert parse(with_queue(text, 3, 4, None)).kv_share is None


def test_what_is_no_number_is_left():
    assert with_queue(b"tgi_queue_size e-e\n", 3, 4, 0.5) == b"tgi_queue_size e-e\n"


def engine(chat, status=200, body=VLLM):
    """Let the engine answer for its metrics; requests go on as before."""
    model = chat.world.model
    others = type(model).request

    def request(exchange):
        if exchange.target.startswith(b"/metrics"):
            exchange.respond(status, [(b"content-type", b"text/plain")], body)
        else:
            others(model, exchange)

    model.request = request


async def waits(chat):
    """One request runs, one waits."""
    chat.ask()
    call = await chat.called(1)
    chat.ask()
    await chat.until(lambda: chat.sidecar.streams.gatekeeper.queued == 1)
    return call


async def test_the_data_port_counts_those_who_wait_at_the_gate(chat):
    await chat.start(policy=TARGETS)
    engine(chat)
    await waits(chat)
    answer = await chat.client.get(b"/metrics")
    assert (answer.status, parse(answer.body).waiting) == (200, 3.0)
    engine(chat, status=404, body=b"not found")
    says = parse((await chat.client.get(b"/metrics")).body)
    assert (says.waiting, says.running) == (1.0, 1.0)


async def test_without_a_gate_bytes_pass_unchanged(chat):
    await chat.start()
    engine(chat)
    assert (await chat.client.get(b"/metrics")).body == VLLM


async def test_switched_off_bytes_pass_unchanged(chat):
    await chat.start(policy=TARGETS, upstream={"url": f"http://127.0.0.1:{chat.world.model.port}", "countQueue": False})
    engine(chat)
    await waits(chat)
    assert (await chat.client.get(b"/metrics")).body == VLLM


async def test_other_paths_and_methods_are_forwarded(chat):
    await chat.start(policy=TARGETS)
    engine(chat)
    assert (await chat.client.get(b"/metrics?name=x")).body == VLLM
