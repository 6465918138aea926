from __future__ import annotations

from itertools import pairwise
from random import Random
from statistics import mean, stdev

import pytest

from carpool_cli.load.loadgen import FAILURES, MAX_COMPLAINTS, LoadGenerator, due_times
from carpool_cli.load.servers import Request
from carpool_sidecar.http1.client.pool import Pool
from carpool_sidecar.http1.server.server import Server


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0])
def test_gaps_have_the_rate_and_spread_asked_for(cv):
    times = due_times([100.0], cv, 200.0, Random(1))
    gaps = [after - before for before, after in pairwise(times)]
    assert mean(gaps) == pytest.approx(0.01, rel=0.05)
    assert stdev(gaps) / mean(gaps) == pytest.approx(cv, rel=0.05)


def test_cv_0_is_even():
    assert due_times([4.0], 0, 1.0, Random(1)) == [0.0, 0.25, 0.5, 0.75]


def test_rates_share_the_time():
    times = due_times([100.0, 0.0, 400.0], 1.0, 30.0, Random(1))
    counts = [sum(start <= time < start + 10 for time in times) for start in (0, 10, 20)]
    assert counts[0] == pytest.approx(1000, rel=0.15)
    assert counts[1] == 0
    assert counts[2] == pytest.approx(4000, rel=0.1)
    assert times == sorted(times)


class Answering:
    """A server that answers with ``status``; with ``None`` it never answers."""

    def __init__(self, status):
        self.status = status
        self.seen = []

    def head(self, exchange): ...

    def sent(self, exchange): ...

    def disconnected(self, exchange): ...

    def refused(self, refusal): ...

    def request(self, exchange):
        self.seen.append(exchange.body)
        if self.status is not None:
            exchange.respond(self.status, [], b'{"predictions": [1]}')


async def load(app, *, due=(0.0, 0.0, 0.0), verify=False, silence=5.0, port=None):
    server = Server(app)
    await server.listen("127.0.0.1", 0)
    pool = Pool("127.0.0.1", port or server.addresses[0][1])
    requests = [Request(b'{"instances": [1]}', []), Request(b'{"instances": [2]}', [])]
    generator = LoadGenerator(pool, "/x", requests, due, protocol="v1", timeout=silence, headers=[], verify=verify)
    recording = await generator.run()
    await pool.close()
    server.stop_accepting()
    server.abort()
    return recording


async def test_every_request_is_recorded_and_bodies_take_turns():
    app = Answering(200)
    recording = await load(app)
    assert list(recording.status) == [200, 200, 200]
    assert sorted(app.seen) == [b'{"instances": [1]}', b'{"instances": [1]}', b'{"instances": [2]}']
    assert all(done >= sent >= due for due, sent, done in zip(*recording[:3], strict=True))
    assert recording.most_outstanding == 3


async def test_errors_keep_their_status_and_what_they_say():
    recording = await load(Answering(503))
    assert list(recording.status) == [503, 503, 503]
    assert (recording.complaints, list(recording.complained)) == (['{"predictions": [1]}'], [1, 1, 1])


async def test_what_errors_say_is_bounded():
    class Numbering(Answering):
        def request(self, exchange):
            self.seen.append(exchange.body)
            exchange.respond(500, [], b"error %d" % len(self.seen))

    recording = await load(Numbering(500), due=[0.0] * (MAX_COMPLAINTS + 2))
    assert len(recording.complaints) == MAX_COMPLAINTS
    assert sorted(recording.complained) == [0, 0, *range(1, MAX_COMPLAINTS + 1)]


async def test_a_status_keeps_what_it_says_whatever_others_say():
    class Numbering(Answering):
        def request(self, exchange):
            self.seen.append(exchange.body)
            last = len(self.seen) > MAX_COMPLAINTS + 1
            exchange.respond(503 if last else 500, [], b"gone" if last else b"request %d" % len(self.seen))

    recording = await load(Numbering(500), due=[0.0] * (MAX_COMPLAINTS + 2))
    (gone,) = [index for index, status in enumerate(recording.status) if status == 503]
    assert recording.complaints[recording.complained[gone] - 1] == "gone"


async def test_a_wrong_echo_is_a_mismatch():
    recording = await load(Answering(200), verify=True)
    assert [FAILURES[-1 - status] if status < 0 else status for status in recording.status] == [200, "mismatch", 200]


async def test_nobody_there_is_refused():
    recording = await load(Answering(200), port=1)
    assert {FAILURES[-1 - status] for status in recording.status} == {"refused"}


async def test_silence_ends_by_the_timeout():
    recording = await load(Answering(None), silence=0.05)
    assert {FAILURES[-1 - status] for status in recording.status} == {"timeout"}
