"""`requests`, unchanged, in front of a sidecar."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

PREDICT, INFER = "v1/models/standin:predict", "v2/models/standin/infer"


@pytest.fixture
def session():
    with requests.Session() as session:
        yield session


def test_v1_rows_come_back_digit_for_digit(served, session):
    body = '{"instances": [[1.0, 1, 1e2, 0.10000000000000000555]]}'
    answer = session.post(f"http://{served.data}/{PREDICT}", data=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert "[1.0, 1, 1e2, 0.10000000000000000555]" in answer.text


def test_v2_in_json(served, session):
    tensor = {"name": "x", "shape": [2, 2], "datatype": "INT32", "data": [[1, 2], [3, 4]]}
    answer = session.post(f"http://{served.data}/{INFER}", json={"id": "7", "inputs": [tensor]}).json()
    assert answer["id"] == "7"
    assert answer["outputs"][0]["shape"] == [2, 2]
    assert answer["outputs"][0]["data"] in ([1, 2, 3, 4], [[1, 2], [3, 4]])


def test_requests_of_threads_are_batched_together_and_get_their_own_rows(served, session):
    def predict(number):
        instances = [[number, index] for index in range(1 + number % 2)]
        answer = session.post(f"http://{served.data}/{PREDICT}", json={"instances": instances})
        return answer.json()["predictions"] == instances

    with ThreadPoolExecutor(10) as threads:
        assert all(threads.map(predict, range(60)))
    assert served.most_rows() > 2


def test_a_body_sent_in_chunks(served, session):
    answer = session.post(f"http://{served.data}/{PREDICT}", data=iter([b'{"instances":', b" [[1, 2]]", b"}"]))
    assert answer.json() == {"predictions": [[1, 2]]}


def test_broken_json_gets_the_model_servers_answer_and_the_connection_lives_on(served, session):
    for _ in range(2):
        answer, direct = (
            session.post(f"http://{address}/{PREDICT}", data=b'{"instances": [[1, 2')
            for address in (served.data, served.upstream)
        )
        assert (answer.status_code, answer.json()) == (direct.status_code, direct.json())
        assert answer.status_code == 400


def test_all_else_is_forwarded(served, session):
    assert session.get(f"http://{served.data}/v1/models").json() == {"models": ["standin"]}
    answer = session.get(f"http://{served.data}/nowhere?a=b")
    direct = session.get(f"http://{served.upstream}/nowhere?a=b")
    assert (answer.status_code, answer.json()) == (direct.status_code, direct.json())


def test_an_answer_read_piece_by_piece(served, session):
    rows = [[0.5 + index] * 20_000 for index in range(20)]  # more than fit one batch
    with session.post(f"http://{served.data}/{PREDICT}", json={"instances": rows}, stream=True) as answer:
        assert json.loads(b"".join(answer.iter_content(8192)))["predictions"] == rows
