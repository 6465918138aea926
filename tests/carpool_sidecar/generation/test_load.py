"""How full the engine is: /capacity, metrics and the report."""

from __future__ import annotations

import pytest

from carpool.generation import calibration
from carpool_sidecar.generation.load import Rate
from carpool_sidecar.tuning.replica_load import SPAN


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_a_rate_is_that_of_the_last_seconds():
    clock = Clock()
    rate = Rate(clock)
    assert rate.per_second() == 0.0
    for _ in range(400):
        clock.now += 0.1
        rate.count()
    assert rate.per_second() == pytest.approx(10.0, rel=0.02)
    clock.now += SPAN + 2
    assert rate.per_second() < 2.0
    clock.now += SPAN + 2
    assert rate.per_second() == 0.0
    assert rate.total == 400


async def asked(chat, first, last):
    for number in range(first, last + 1):
        reader = chat.ask(prompt="a" * 400)
        (await chat.called(number)).token().token().token().finish(prompt_tokens=90)
        await reader


async def test_capacity_is_known_once_enough_answers_have_ended(chat, monkeypatch):
    monkeypatch.setattr(calibration, "ENOUGH_WINDOWS", 0)  # these answers take no time
    await chat.start(policy={"slo": {"ttft": {"p99": "20s"}, "tpot": {"p99": "10s"}}})
    admin = chat.world.client(chat.sidecar.admin.address)
    await asked(chat, 1, 1)
    before = (await admin.get(b"/capacity")).json["tokenStreams"]
    assert before["capacity"] is None
    await asked(chat, 2, 21)
    answer = await admin.get(b"/capacity")
    own = answer.json["tokenStreams"]
    assert answer.status == 200
    assert own["capacityTokens"] == pytest.approx(3 * own["capacity"])
    assert answer.json["load"] == pytest.approx(own["rate"] / own["capacity"])
    text = (await admin.get(b"/metrics")).body.decode()
    assert "carpool_generation_capacity_tokens_per_second" in text
    assert "carpool_generation_arrivals_total 21.0" in text


async def test_without_a_target_for_tpot_nothing_is_said_of_capacity(chat):
    await chat.start(policy={"slo": {"ttft": {"p99": "20s"}}})
    await asked(chat, 1, 1)
    admin = chat.world.client(chat.sidecar.admin.address)
    answer = await admin.get(b"/capacity")
    assert (answer.status, answer.json["tokenStreams"], answer.json["load"]) == (200, None, 0.0)
