from __future__ import annotations

import pytest

from carpool_operator.api.model import Event
from carpool_operator.cluster.writing import Writer
from carpool_operator.reporting.events import LASTING, WINDOW, About, Recorder

ABOUT = About("apps/v1", "Deployment", "ns", "web", "uid-1")
EVENT = Event(True, "AnnotationInvalid", "carpool.dev/slo-p99 is '50'")
WALL = 1_800_000_000.0


@pytest.fixture
def recorder(writer):
    return Recorder(writer, "operator-1")


async def test_an_event_names_its_object_and_its_reason(api, recorder):
    recorder.record(ABOUT, EVENT, WALL)
    await recorder.flush(WALL)

    (event,) = api.all("events")
    assert event["regarding"] == {
        "apiVersion": "apps/v1", "kind": "Deployment", "namespace": "ns", "name": "web", "uid": "uid-1"
    }  # fmt: skip
    assert (event["type"], event["reason"], event["note"]) == ("Warning", EVENT.reason, EVENT.message)
    assert event["eventTime"] == "2027-01-15T08:00:00.000000Z"


async def test_the_longest_names_are_shortened_to_such_as_may_be(api, recorder):
    recorder.record(ABOUT._replace(name="a" * 229 + "." + "b" * 23), EVENT, WALL)
    await recorder.flush(WALL)

    (event,) = api.all("events")
    assert event["metadata"]["name"].startswith("a" * 229 + ".")
    assert ".." not in event["metadata"]["name"]


async def test_the_same_is_not_said_twice_within_ten_minutes(api, recorder):
    for seconds in range(0, 60, 2):
        recorder.record(ABOUT, EVENT, WALL + seconds)
        await recorder.flush(WALL)
    recorder.record(ABOUT, Event(False, "Applied", "8 rows"), WALL + 60)
    await recorder.flush(WALL)

    assert len(api.all("events")) == 2
    recorder.record(ABOUT, EVENT, WALL + WINDOW)
    await recorder.flush(WALL)
    assert len(api.all("events")) == 3


async def test_what_lasts_is_said_again_every_hour(api, recorder):
    for seconds in range(0, 3 * int(LASTING), 60):
        recorder.record(ABOUT, EVENT, WALL + seconds, LASTING)
        await recorder.flush(WALL + seconds)

    assert len(api.all("events")) == 3


async def test_nor_after_a_restart(api, recorder):
    recorder.record(ABOUT, EVENT, WALL)
    await recorder.flush(WALL)
    kube = api.kube()
    again = Recorder(Writer(kube, lambda: True), "operator-2")
    again.record(ABOUT, EVENT, WALL + 10)
    await again.flush(WALL)

    assert len(api.all("events")) == 1
    kube.close()


async def test_what_fails_is_tried_again_and_given_up_in_the_end(api, recorder):
    api.fail("POST", 500, times=2)
    recorder.record(ABOUT, EVENT, WALL)
    for _ in range(3):
        await recorder.flush(WALL)
    assert len(api.all("events")) == 1

    api.fail("POST", 500, times=10)
    recorder.record(ABOUT, Event(False, "Applied", "8 rows"), WALL)
    for seconds in range(0, 2000, 100):
        await recorder.flush(WALL + seconds)
    assert sum(line.startswith("POST") for line in api.log) == 3 + 4


async def test_a_long_message_and_a_long_name_fit(api, recorder):
    recorder.record(ABOUT._replace(name="w" * 253), Event(True, "Long", "x" * 5000), WALL)
    await recorder.flush(WALL)

    (event,) = api.all("events")
    assert len(event["note"]) == 1024
    assert len(event["metadata"]["name"]) <= 253
