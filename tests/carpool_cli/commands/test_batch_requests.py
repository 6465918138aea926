"""`carpool batch` with a file of OpenAI's Batch API."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

CHAT = "/v1/chat/completions"
SAID = {
    "wrong": (400, {"error": {"message": "no", "type": "invalid_request_error", "param": None, "code": "length"}}),
    "broken": (500, {"error": {"message": "failed"}}),
    "busy": (429, {"error": {"message": "later"}}),
}


class Server:
    """Says each body back; the model's name says what else. ``seen``: paths, bodies and headers."""

    def __init__(self):
        self.seen = []
        self.changed = threading.Condition()
        self.busy = 0
        self.later = "2"
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with server.changed:
                    server.seen.append((self.path, body, dict(self.headers)))
                    server.changed.notify_all()
                status, said = SAID.get(body.get("model"), (200, body))
                if server.busy:
                    server.busy -= 1
                    status, said = SAID["busy"]
                if body.get("model") == "hanging":
                    self.connection.recv(1)  # until the client leaves
                    return
                if body.get("model") == "slow":
                    server.until(50)
                text = json.dumps(said, indent=2).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(text)))
                self.send_header("x-request-id", "req-7")
                if status == 429:
                    self.send_header("retry-after", server.later)
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def until(self, count, process=None):
        """Wait for so many requests in all, or for the end of a process that sends them."""

        def notify():
            process.wait()
            with self.changed:
                self.changed.notify_all()

        if process is not None:
            threading.Thread(target=notify).start()
        with self.changed:
            assert self.changed.wait_for(
                lambda: len(self.seen) >= count or (process is not None and process.returncode is not None), 60
            )


@pytest.fixture
def server(serving):
    found = Server()
    with serving(found.http):
        yield found


def line(number, **changes):
    body = {"model": changes.pop("model", "m"), "messages": [{"role": "user", "content": f"é {number}"}]}
    return json.dumps({"custom_id": f"c{number}", "method": "POST", "url": CHAT, "body": body} | changes)


def records(path):
    return [json.loads(each) for each in path.read_text().splitlines()]


@pytest.fixture
def paths(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "out.jsonl.errors.jsonl"


def test_answers_have_the_form_of_the_batch_api_and_the_order_of_the_lines(server, carpool, paths):
    source, output, errors = paths
    source.write_text("\n".join([line(0, model="slow"), "", *(line(number) for number in range(1, 50))]))
    result = carpool("batch", source, output, "--upstream", server.url, "--header", "authorization: Bearer x")
    assert result.exit_code == 0, result.output
    found = records(output)
    assert [each["custom_id"] for each in found] == [f"c{number}" for number in range(50)]
    response = found[1]["response"]
    assert set(found[1]) == {"id", "custom_id", "response", "error"}
    assert (response["status_code"], response["request_id"], found[1]["error"]) == (200, "req-7", None)
    assert response["body"]["messages"][0]["content"] == "é 1"
    assert not errors.exists()
    path, _, headers = server.seen[0]
    assert (path, headers["x-carpool-priority"], headers["authorization"]) == (CHAT, "batch", "Bearer x")


def test_lines_that_are_wrong_are_named_by_their_number(server, carpool, paths, monkeypatch):
    monkeypatch.setattr("carpool_cli.batch.job.Stopping.wait", lambda *_: False)
    source, output, errors = paths
    bad = [
        "oops", '{"custom_id": "x", "url": "/v1/x"}', line(4, method="GET"), line(5, url="v1/x"), line(6, body=[]),
        line(7, body={"stream": True}), line(8, model="wrong"), line(9, model="broken"),
    ]  # fmt: skip
    source.write_text("\n".join([line(1), *bad, line(10)]))
    result = carpool("batch", source, output, "--upstream", server.url, "--retries", 2)
    assert result.exit_code == 3, result.output
    assert [each["custom_id"] for each in records(output)] == ["c1", "c10"]
    found = records(errors)
    assert [each["line"] for each in found] == list(range(2, 10))
    assert [each["custom_id"] for each in found] == [None, "x", "c4", "c5", "c6", "c7", "c8", "c9"]
    assert {each["error"]["code"] for each in found[:6]} == {"invalid_request"}
    assert "stream is true" in found[5]["error"]["message"]
    assert found[6]["response"]["body"]["error"]["code"] == "length"
    assert [each["error"]["code"] for each in found[6:]] == ["status-400", "status-500"]
    models = [body["model"] for _, body, _ in server.seen]
    assert (models.count("wrong"), models.count("broken")) == (1, 3)


def test_a_server_that_can_take_none_now_is_asked_again_when_it_says(server, carpool, paths, monkeypatch):
    slept = []
    monkeypatch.setattr("carpool_cli.batch.job.Stopping.wait", lambda _, seconds: slept.append(seconds))
    source, output, _ = paths
    source.write_text(line(1))
    server.busy = 2
    assert carpool("batch", source, output, "--upstream", server.url).exit_code == 0
    assert slept == [2.0, 2.0]
    assert [each["custom_id"] for each in records(output)] == ["c1"]


@pytest.mark.parametrize(("says", "seconds"), [("12345", 600.0), ("120", 120.0), ("soon", 1.0)])
def test_a_server_can_make_a_request_wait_for_ten_minutes_at_most(server, carpool, paths, monkeypatch, says, seconds):
    waits = []
    monkeypatch.setattr("carpool_cli.batch.job.Stopping.wait", lambda _, seconds: waits.append(seconds))
    source, output, _ = paths
    source.write_text(line(1))
    server.busy, server.later = 1, says
    assert carpool("batch", source, output, "--upstream", server.url).exit_code == 0
    assert waits == [seconds]


def test_it_stops_while_the_server_refuses_and_goes_on_from_there(server, carpool, paths, monkeypatch):
    monkeypatch.setattr("carpool_cli.batch.job.Stopping.wait", lambda *_: False)
    source, output, _ = paths
    source.write_text("\n".join(line(number) for number in range(9)))
    command = ("batch", source, output, "--upstream", server.url, "--concurrency", 1, "--retries", 0)
    server.busy = 1
    stopped = carpool(*command)
    assert (stopped.exit_code, "status 429" in stopped.output) == (1, True)
    assert carpool(*command).exit_code == 0
    assert [each["custom_id"] for each in records(output)] == [f"c{number}" for number in range(9)]


@pytest.mark.parametrize("status", [401, 403])
def test_a_caller_that_is_refused_stops_at_once_with_the_code(server, carpool, paths, monkeypatch, status):
    monkeypatch.setitem(SAID, "refused", (status, {"error": "no"}))
    monkeypatch.setattr("carpool_cli.batch.job.Stopping.wait", lambda *_: pytest.fail("nothing to wait for"))
    source, output, _ = paths
    source.write_text(line(1, model="refused"))
    result = carpool("batch", source, output, "--upstream", server.url)
    assert (result.exit_code, len(server.seen)) == (1, 1)
    assert f"stopped: status {status}, which " in result.output


def test_killed_it_goes_on_and_loses_and_repeats_nothing(server, paths):
    source, output, errors = paths
    source.write_text("\n".join(line(number, model="wrong" if number % 7 == 3 else "m") for number in range(200)))
    command = [sys.executable, "-m", "carpool_cli", "batch", source, output, "--upstream", server.url]
    kills = 0
    while True:
        process = subprocess.Popen([*map(str, command), "--concurrency", "2"], stderr=subprocess.PIPE)  # noqa: S603 - our own
        server.until(len(server.seen) + 60, process)
        if process.poll() is None and kills < 2:
            process.send_signal(signal.SIGKILL)
            kills += 1
            process.communicate()
            continue
        said = process.communicate()[1]
        break
    assert (process.returncode, kills) == (3, 2), said
    assert [each["custom_id"] for each in records(output)] == [f"c{n}" for n in range(200) if n % 7 != 3]
    assert [each["line"] for each in records(errors)] == [n + 1 for n in range(200) if n % 7 == 3]


@pytest.mark.parametrize("waiting", [2, 9])
def test_interrupted_it_does_not_wait_for_answers(server, paths, waiting):
    source, output, _ = paths
    source.write_text("\n".join([line(0), *(line(number, model="hanging") for number in range(1, waiting))]))
    command = [sys.executable, "-m", "carpool_cli", "batch", source, output, "--upstream", server.url]
    process = subprocess.Popen([*map(str, command), "--concurrency", "4"], stderr=subprocess.PIPE, text=True)  # noqa: S603 - our own
    server.until(min(waiting, 5))
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=30)[1]
    # The one answer has no checkpoint yet.
    assert (process.returncode, "stopped. 0 answers are kept; the same command resumes" in said) == (130, True), said
    assert "no answer" not in said, "it closed these connections itself"


def test_shards_have_the_numbers_of_the_whole_input(server, carpool, paths):
    source, output, errors = paths
    source.write_text("\n".join(line(number, model="wrong" if number == 30 else "m") for number in range(40)))
    for shard in range(3):
        command = ("batch", source, output, "--upstream", server.url, "--shards", 3, "--shard", shard)
        assert carpool(*command).exit_code in {0, 3}
    assert carpool("batch", source, output, "--upstream", server.url, "--shards", 3, "--join").exit_code == 3
    assert [each["custom_id"] for each in records(output)] == [f"c{n}" for n in range(40) if n != 30]
    assert [each["line"] for each in records(errors)] == [31]


@pytest.mark.parametrize("base", ["", "/v1", "/deep"])
def test_a_base_url_may_end_in_v1(server, carpool, paths, base):
    source, output, _ = paths
    source.write_text(line(1))
    assert carpool("batch", source, output, "--upstream", server.url + base).exit_code == 0
    assert server.seen[0][0] == ("/deep" if base == "/deep" else "") + CHAT


@pytest.mark.parametrize(
    "first", [line(0, image="A" * 1_200_000), "\ufeff" + line(0), "oops\n\n" + "[" * 5000 + "\n" + line(0)]
)
def test_requests_are_recognised(server, carpool, paths, first):
    source, output, _ = paths
    source.write_text(f"{first}\n{line(1)}\n")
    assert carpool("batch", source, output, "--upstream", server.url).exit_code in {0, 3}
    assert [path for path, *_ in server.seen] == [CHAT, CHAT]
    assert [each["custom_id"] for each in records(output)] == ["c0", "c1"]


@pytest.mark.parametrize("text", ["oops\n" * 8 + line(1), "oops\n", "oops\n\n"])
def test_a_file_whose_first_lines_are_no_json_needs_a_protocol(server, carpool, paths, text):
    source, output, _ = paths
    source.write_text(text)
    result = carpool("batch", source, output, "--upstream", server.url)
    assert (result.exit_code, "name --protocol" in result.output, server.seen) == (2, True, [])
    assert carpool("batch", source, output, "--upstream", server.url, "--protocol", "openai").exit_code == 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--protocol", "openai", "--onnx", "m.onnx"], "--protocol openai is for .jsonl and --upstream"),
        (["--upstream", "x:1", "--batch-size", "4"], "without --batch-size"),
    ],
)
def test_options_that_do_not_fit(carpool, paths, options, says):
    source, output, _ = paths
    source.write_text(line(1))
    paths[0].with_name("m.onnx").write_bytes(b"")
    result = carpool(
        "batch", source, output, *(str(source.with_name("m.onnx")) if o == "m.onnx" else o for o in options)
    )
    assert (result.exit_code, says in result.output) == (2, True), result.output


def test_a_line_that_is_too_long_is_not_read(server, carpool, paths, monkeypatch):
    monkeypatch.setattr("carpool_cli.batch.formats.LONGEST_LINE", 1000)
    source, output, errors = paths
    source.write_text("\n".join([line(0), line(1, custom_id="x" * 5000), line(2)]))
    assert carpool("batch", source, output, "--upstream", server.url).exit_code == 3
    assert [each["custom_id"] for each in records(output)] == ["c0", "c2"]
    (error,) = records(errors)
    assert (error["line"], error["error"]["message"]) == (2, "the line has over 1000 bytes")
