from __future__ import annotations

import json
from random import Random

import pytest
from neighbours import model
from neighbours.model import BROKEN, REFUSED, SHORT

ROWS = [[2, 3], [4, 5]]
MADE = [[2, 3, 65], [4, 5, 129]]


def answered(question):
    return model.reply(question.target, question.body)


def judged(question, status, body):
    return model.judge(question, status, b"HTTP/1.1 200 OK\r\nx: y\r\n\r\n" + body)


@pytest.mark.parametrize("question", [model.v1(ROWS), model.v2(ROWS), model.v2(ROWS, "a")])
def test_an_answer_is_right_for_its_own_request_only(question):
    answer = answered(question)
    assert (answer.status, answer.rows) == (200, 2)
    assert judged(question, 200, answer.body) == "ok"
    for other in (model.v1([[2, 4], [4, 5]]), model.v2([[2, 3]], "a"), model.v2(ROWS, "b")):
        assert judged(other, 200, answer.body) == "wrong"


def test_every_healthy_request_is_another_and_has_a_right_answer():
    rng = Random(1)
    questions = [model.healthy(serial, rng) for serial in range(40)]
    assert len({question.body for question in questions}) == 40
    assert {question.target[:4] for question in questions} == {b"/v1/", b"/v2/"}
    assert {bool(question.id) for question in questions} == {False, True}
    assert all(judged(question, 200, answered(question).body) == "ok" for question in questions)


@pytest.mark.parametrize(("first", "status"), [(REFUSED, 422), (BROKEN, 500)])
@pytest.mark.parametrize("ask", [model.v1, model.v2])
def test_one_poisoned_row_spoils_a_call_and_the_error_names_it(first, status, ask):
    answer = answered(ask([*ROWS, [first, 77]]))
    assert (answer.status, answer.rows) == (status, 3)
    assert b"private to row 77" in answer.body
    assert judged(ask(ROWS), status, answer.body) == "foreign"


@pytest.mark.parametrize("ask", [model.v1, model.v2])
def test_a_short_answer_lacks_the_poisoned_rows(ask):
    answer = answered(ask([ROWS[0], [SHORT, 9], ROWS[1]]))
    assert judged(ask(ROWS), 200, answer.body) == "ok"


def test_somebody_elses_text_in_a_header_counts_too():
    question = model.v1(ROWS)
    answer = b"HTTP/1.1 200 OK\r\nx: private to row 3\r\n\r\n" + answered(question).body
    assert model.judge(question, 200, answer) == "foreign"


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (429, b'{"error":"the queue is full","reason":"queue-full"}', "429 queue-full"),
        (500, b'{"error":"no"}', "500 no"),
        (502, b"<html>", "502 b'<html>'"),
        (200, b"no JSON", "wrong"),
        (200, b"[]", "wrong"),
        (200, b'{"outputs":[]}', "wrong"),
    ],
)
def test_failures_are_named(status, body, kind):
    for question in (model.v1(ROWS), model.v2(ROWS)):
        assert judged(question, status, body) == kind


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"instances":[1]}', b'{"instances":[[1,2,3]]}'])
def test_what_cannot_be_read_is_refused(body):
    assert model.reply(b"/v1/models/m:predict", body).status == 400


@pytest.mark.parametrize("data", [[2, 3, 4, 5], ROWS])
def test_v2_data_may_be_flat_or_nested(data):
    body = json.dumps({"inputs": [{"shape": [2, 2], "data": data}]}).encode()
    answer = model.reply(b"/v2/models/m/infer", body)
    assert json.loads(answer.body)["outputs"][0]["data"] == [value for row in MADE for value in row]


def test_v2_data_that_contradicts_its_shape_is_refused():
    body = json.dumps({"inputs": [{"shape": [3, 2], "data": [1, 2]}]}).encode()
    assert model.reply(b"/v2/models/m/infer", body).status == 400
