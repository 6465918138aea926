from __future__ import annotations

import asyncio
import logging

import pytest

from carpool_sidecar.admin.health import Health
from carpool_sidecar.backends.base import Document, Traffic


@pytest.fixture
def health():
    found = []
    health = Health(Server({}), found.append, lambda: 0.0, logging.getLogger("test"))
    health.found = found
    return health


def test_ready_mirrors_the_model(health):  # KServe: ready before the model
    assert not health.ready
    for status, ready in ((503, False), (200, True), (400, False), (200, True)):
        health.observe(Document(status))
        assert health.ready is ready
        assert health.reason


@pytest.mark.parametrize("status", [200, 202, 204, 301, 307])
def test_ready_is_what_a_kubelet_takes_for_it(health, status):
    health.observe(Document(status))
    assert health.ready


@pytest.mark.parametrize("status", [401, 403, 404, 405, 501])
def test_a_server_that_does_not_know_the_question_is_ready_when_it_answers(health, status):
    health.observe(Document(status))
    assert health.ready


def test_a_server_of_another_protocol_is_ready_when_it_answers(health):
    health.observe(Document(0, foreign=True))
    assert (health.ready, health.reason, health.found) == (True, "ready", [False])


def test_a_server_that_is_there_again_was_restarted(health):
    health.observe(Document(0, reachable=False, why="no connection: Connection refused"))
    assert (health.ready, health.found) == (False, [])
    assert health.reason == "no connection: Connection refused"
    health.observe(Document(200))
    assert health.found == [False]  # the first time there is nothing to forget
    health.observe(Document(200))
    health.observe(Document(0, reachable=False))
    health.observe(Document(200))
    assert health.found == [False, True]


def test_a_slow_server_is_not_ready_and_not_restarted(health):
    health.observe(Document(200))
    health.observe(Document(0, reachable=True))
    assert not health.ready
    health.observe(Document(200))
    assert health.found == [False, False]


def test_a_server_without_a_connection_is_not_ready_and_not_restarted(health):
    why = Document(0, why="no connection: Name or service not known")
    health.observe(why)
    assert (health.ready, health.reason) == (False, why.why)
    health.observe(Document(200))
    health.observe(why)
    assert (health.ready, health.reason) == (False, why.why)
    health.observe(Document(200))
    assert health.found == [False, False]


def test_a_model_that_was_loaded_is_asked_for_its_metadata(health):
    health.observe(Document(503))
    assert health.found == [False]
    health.observe(Document(503))
    health.observe(Document(200))
    health.observe(Document(200))
    assert health.found == [False, False]


def test_a_restart_between_two_checks_is_detected_by_the_calls_that_failed(health):
    health.observe(Document(200))
    health.unreachable()
    health.observe(Document(200))
    assert health.found == [False, True]


HANGS_UP = Document(0, foreign=True)
GONE = Document(0, reachable=False)
SILENT = Document(0)


class Server:
    """A model server's answers by path; 400 to all others, as TensorFlow Serving's."""

    def __init__(self, answers, readiness=None):
        self.answers = answers
        self.readiness = readiness
        self.traffic = Traffic(0, 0)
        self.asked = []
        self.connection = HANGS_UP
        self.now = 1000.0

    async def ask(self, path):
        self.asked.append(path)
        answer = self.answers.get(path, 400)
        return answer if isinstance(answer, Document) else Document(answer)

    async def connect(self):
        self.asked.append("connect")
        return self.connection


def made(server, clock=lambda: 0.0, patience=0.0):
    return Health(server, lambda _: None, clock, logging.getLogger("test"), patience)


@pytest.mark.parametrize(
    ("answers", "status"),
    [
        ({}, 404),
        ({b"/v2/health/ready": 500, b"/v2/health/live": 500}, 404),
        ({b"/v2/health/live": 200}, 400),  # Triton, not ready
        ({b"/v2/health/ready": 503}, 503),
        ({b"/v2/health/ready": 500, b"/v2/health/live": 503}, 500),
        ({b"/v2/health/ready": 200}, 200),
        ({b"/v2/health/ready": 500, b"/v2/health/live": 0}, 500),
    ],
)
async def test_who_does_not_speak_v2_is_not_asked_in_it(answers, status):
    assert (await made(Server(answers)).look()).status == status


async def test_a_path_that_somebody_named_is_believed():
    server = Server({}, readiness=b"/healthy")
    assert (await made(server).look()).status == 400


@pytest.fixture
def looks():
    """Look at a server that answers READY and LIVE in a given way; return whether it is ready then."""
    server = Server({})
    health = made(server, lambda: server.now)

    async def looks(ready, live=400):
        server.answers = {b"/v2/health/ready": ready, b"/v2/health/live": live}
        health.observe(await health.look())
        return health.ready

    looks.health, looks.server = health, server
    return looks


@pytest.mark.parametrize("known", [(200, 200), (400, 200)], ids=["was ready", "was loading"])
@pytest.mark.parametrize("error", [400, 404, 500])
async def test_errors_of_a_server_that_spoke_v2_count(looks, known, error):  # Triton exits: 400 to both questions
    await looks(*known)
    assert not await looks(error, error)
    assert looks.health.reason == f"the model answers that question with {error}"
    assert await looks(200, 200)
    await looks(GONE)
    assert await looks(error, error)  # maybe another server, about which nothing is known


async def test_a_hang_up_of_a_server_that_spoke_v2_changes_nothing(looks):
    assert await looks(200)
    assert await looks(HANGS_UP)
    assert not await looks(503)
    assert not await looks(HANGS_UP)
    assert looks.health.reason == "the model answers that question with 503"


async def test_a_server_that_works_for_callers_may_be_late_with_its_answer(looks):
    looks.server.traffic = Traffic(1, 0)
    assert not await looks(SILENT)  # it never answered a question
    assert await looks(200)
    assert await looks(SILENT)  # one request takes longer than the question may
    assert looks.health.reason == "ready"
    looks.server.traffic = Traffic(0, 1)
    assert await looks(SILENT)  # a request was answered meanwhile
    assert not await looks(SILENT)
    looks.server.traffic = Traffic(1, 1)
    assert not await looks(SILENT)  # as it was: traffic makes nothing ready
    assert looks.health.reason == "the model does not answer that question in time"
    assert not await looks(503)
    assert await looks(200)
    looks.health.unreachable()
    assert not await looks(SILENT)  # another process may be there


READY, LIVE = b"/v2/health/ready", b"/v2/health/live"


@pytest.mark.parametrize(("status", "questions"), [(404, [READY]), (405, [READY]), (500, [READY, LIVE])])
async def test_a_server_that_does_not_speak_v2_is_only_connected_to(looks, status, questions):  # GET may run its model
    server = looks.server
    assert await looks(status, status)
    for _ in range(29):
        server.now += 1.0
        assert await looks(status, status)
    assert server.asked == [*questions, *["connect"] * 29]
    server.now += 1.0
    assert await looks(200)
    server.now += 1.0
    assert not await looks(500)  # it speaks V2 by now
    assert server.asked[30 + len(questions) - 1 :] == [READY, READY]


async def test_a_server_that_does_not_speak_v2_and_was_gone_is_asked_anew(looks):
    server = looks.server
    assert await looks(404)
    server.connection = GONE
    assert not await looks(404)
    assert not await looks(GONE)
    assert not await looks(503)
    assert await looks(404)
    looks.health.unreachable()
    assert not await looks(503)
    assert server.asked == [READY, "connect", READY, READY, LIVE, READY, READY, LIVE]


async def test_a_server_that_does_not_speak_v2_owes_no_answer(looks):
    server = looks.server
    assert await looks(404)
    server.connection = SILENT  # its backlog is full
    assert await looks(404)
    server.connection = Document(0, why="no connection: Name or service not known")
    assert not await looks(404)
    server.connection = HANGS_UP
    assert await looks(404)
    for answer in (SILENT, HANGS_UP, 503, 500):  # 503: it has no room for one more connection
        server.now += 31.0
        assert await looks(answer, SILENT)
    assert server.asked == [READY, *["connect"] * 3, *[READY] * 4, LIVE]
    assert await looks(404)
    assert server.asked[-1] == "connect"


async def test_a_server_that_says_503_to_all_it_does_not_know_is_ready_after_a_while(looks):
    """Without a sidecar its pod is ready at once: a question of ours, which it does not know, must not prevent that."""
    server = looks.server
    for _ in range(60):
        assert not await looks(503, 503)
        server.now += 1.0
    assert await looks(503, 503)
    assert looks.health.reason == "ready"
    for _ in range(60):
        server.now += 1.0
        assert await looks(503, 503)
    server.connection = GONE
    server.now += 1.0
    assert not await looks(GONE, GONE)
    assert await looks(503, 503), "it is the same server after a restart"
    looks.health.unreachable()
    assert await looks(503, 503), "one call that found nobody does not take it out for another minute"


async def test_a_server_that_loads_for_longer_than_that_and_then_speaks_v2_is_believed(looks):
    server = looks.server
    for _ in range(61):
        await looks(503, 503)
        server.now += 1.0
    assert looks.health.ready
    for _ in range(30):
        await looks(503, 200)
        server.now += 1.0
    assert looks.health.reason == "the model answers that question with 503"
    looks.health.unreachable()
    for _ in range(300):
        assert not await looks(503, 503), "it loads its model again"
        server.now += 1.0


@pytest.mark.parametrize("meanwhile", ["restarts", "refuses one call"])
@pytest.mark.parametrize("before", [(200, 200), (503, 200), (400, 200)])
async def test_503_of_a_server_that_ever_spoke_v2_is_believed_for_ever(looks, before, meanwhile):
    await looks(*before)
    if meanwhile == "restarts":
        await looks(GONE, GONE)
    else:
        looks.health.unreachable()
    for _ in range(300):
        assert not await looks(503, 503)
        looks.server.now += 1.0


@pytest.mark.parametrize("live", [200, 404, SILENT])
async def test_a_server_that_knows_one_of_both_questions_is_not_ready_while_it_says_503(looks, live):
    for _ in range(300):
        assert not await looks(503, live)
        looks.server.now += 1.0


async def test_the_while_begins_anew_with_another_answer(looks):
    for _ in range(3):
        assert not await looks(503, 503)
        looks.server.now += 40.0
        assert not await looks(SILENT, SILENT)
        looks.server.now += 1.0


@pytest.mark.parametrize("path", [b"/healthy", READY])
@pytest.mark.parametrize("status", [503, 400])
async def test_errors_at_a_path_that_somebody_named_are_believed_for_ever(looks, path, status):
    server = looks.server
    server.readiness, server.answers = path, {path: status, LIVE: status}
    for _ in range(300):
        looks.health.observe(await looks.health.look())
        assert not looks.health.ready
        server.now += 1.0


async def test_while_callers_are_served_nobody_connects_to_see_whether_the_server_is_there(looks):
    server = looks.server
    assert await looks(404)
    server.traffic = Traffic(1, 0)
    assert await looks(404)
    server.traffic = Traffic(0, 5)
    assert await looks(404)
    assert server.asked == [READY]
    assert await looks(404)
    assert server.asked == [READY, "connect"]


async def test_a_path_that_somebody_named_is_always_asked(looks):
    server = looks.server
    server.readiness = b"/healthy"
    for status in (404, 200, 500, 404):
        server.answers[b"/healthy"] = status
        looks.health.observe(await looks.health.look())
        assert looks.health.ready is (status != 500)
    assert server.asked == [b"/healthy"] * 4


async def test_a_model_that_was_ready_may_say_for_a_while_that_it_is_not():
    """As long as its own probe bears it: Triton says so while it loads another version, in all replicas at once."""
    server = Server({}, readiness=READY)
    health = made(server, lambda: server.now, patience=30.0)

    async def is_ready(answer):
        server.answers = {READY: answer}
        health.observe(await health.look())
        server.now += 1.0
        return health.ready

    assert not await is_ready(503)  # it was never ready
    for _ in range(2):
        assert await is_ready(200)
        assert [await is_ready(503) for _ in range(20)] == [True] * 20
        assert await is_ready(200)  # it begins anew
        assert [await is_ready((503, SILENT, HANGS_UP)[each % 3]) for each in range(30)] == [True] * 30
        assert health.reason == "ready"
        assert [await is_ready(503) for _ in range(3)] == [False] * 3
    assert await is_ready(200)
    assert not await is_ready(GONE)  # nobody is there: at once
    assert await is_ready(200)
    health.unreachable()
    assert not await is_ready(503)  # another process may be there


async def test_hang_ups_at_a_path_that_somebody_named_end_a_failure():
    """Each counts as ready there: two timeouts minutes apart are two short failures."""
    server = Server({}, readiness=b"/healthy")
    health = made(server, lambda: server.now, patience=30.0)

    async def is_ready(answer):
        server.answers = {b"/healthy": answer}
        health.observe(await health.look())
        server.now += 1.0
        return health.ready

    for _ in range(2):
        assert [await is_ready(HANGS_UP) for _ in range(100)] == [True] * 100
        assert await is_ready(SILENT)
    assert await is_ready(HANGS_UP)
    assert [await is_ready(SILENT) for _ in range(33)] == [True] * 30 + [False] * 3


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("takes", "answer", "times"),
    [
        (0.25, Document(200), [0, 1.25, 2.5]),
        (8.0, Document(200), [0, 16, 32]),
        (60.0, SILENT, [0, 61, 122]),
    ],
)
async def test_an_answer_that_takes_seconds_is_asked_for_half_of_the_time(takes, answer, times):
    """SGLang's ``/health_generate`` generates. One that does not come in time is asked for at once, as kubelets do."""
    server, loop = Server({}, readiness=READY), asyncio.get_running_loop()
    asked, began = [], loop.time()

    async def ask(_):
        asked.append(round(loop.time() - began, 3))
        await asyncio.sleep(takes)
        return answer

    server.ask = ask
    health = made(server, loop.time)
    looking = asyncio.ensure_future(health.run())
    await asyncio.sleep(times[-1] + 0.1)
    looking.cancel()
    assert asked == times
    assert health.ready is (answer.status == 200)
