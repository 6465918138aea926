from __future__ import annotations

from carpool.exchange.report import NOT_FOUND, OTHER
from carpool_sidecar.admin.forwarded import LONGEST, MOST, Forwarded


def test_what_is_passed_on_is_counted_by_path():
    forwarded = Forwarded()
    for status, seconds in ((200, 0.01), (200, 0.2), (500, 0.01)):
        forwarded.count(b"POST", b"/embed", status, seconds, 0.05)
    counts = forwarded.paths["POST", "/embed"]
    assert (counts.requests, counts.hits, counts.statuses) == (3, 1, {200: 2, 500: 1})
    assert sum(counts.durations) == 2
    assert round(counts.seconds, 6) == 0.21


def test_paths_that_callers_make_up_take_no_room():
    forwarded = Forwarded()
    for method in (b"GET", b"POST", b"MADE", b"UP"):
        forwarded.count(method, b"/nothing", 404, 0.0, 1.0)
    forwarded.count(b"GET", b"/" + b"x" * LONGEST, 200, 0.0, 1.0)
    for number in range(2 * MOST):
        forwarded.count(b"GET", b"/%d" % number, 200, 0.0, 1.0)
    assert len(forwarded.paths) == MOST + 4
    assert forwarded.paths["", OTHER].requests == 1 + MOST
    assert {method: forwarded.paths[method, NOT_FOUND].requests for method in ("GET", "POST", "")} == {
        "GET": 1, "POST": 1, "": 2
    }  # fmt: skip


def test_a_known_path_keeps_its_name_whatever_it_answers():
    forwarded = Forwarded()
    forwarded.count(b"GET", b"/a", 200, 0.0, 1.0)
    forwarded.count(b"GET", b"/a", 404, 0.0, 1.0)
    assert forwarded.paths["GET", "/a"].statuses == {200: 1, 404: 1}


async def test_every_path_is_in_metrics_and_report(world):
    sidecar, client = await world.start()
    for _ in range(3):
        assert (await client.send(b"POST", b"/embed?x=1", b'{"instances": [1]}')).status == 200
    admin = world.client(sidecar.admin.address)
    text = (await admin.get(b"/metrics")).body.decode()
    path = 'method="POST",path="/embed"'
    assert f'carpool_forwarded_requests_total{{code="200",{path}}} 3.0' in text
    assert f"carpool_forwarded_duration_seconds_count{{{path}}} 3.0" in text
    assert f"carpool_forwarded_slo_hits_total{{{path}}} 3.0" in text
    (found,) = (each for each in (await admin.get(b"/v1/stats")).json["forwarded"] if each["path"] == "/embed")
    assert (found["method"], found["requests"], found["hits"], sum(found["durations"])) == ("POST", 3, 3, 3)
