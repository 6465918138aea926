"""The worker on a machine that says bytes: what is computed is the test's word."""

from __future__ import annotations

import os
import threading
import time

import pytest

from carpool_sidecar.frames import LENGTH
from carpool_sidecar.llm.messages import (
    Accepted,
    Add,
    Cancel,
    Piece,
    Ping,
    Pong,
    Refused,
    Sampling,
    Stepped,
    Token,
    frame,
    read_reply,
)
from carpool_sidecar.llm.requests import LARGEST_BODY
from carpool_sidecar.llm.worker import Worker, Wrong, cut_at, serve


class Sequence:
    def __init__(self, says, end="length"):
        self.says = list(says)
        self.end = end
        self.new = ([], [], "")
        self.cancelled = False

    def advance(self):
        byte = self.says.pop(0)
        self.new = ([byte], [-0.5], "" if self.says else self.end)

    def read(self):
        new, self.new = self.new, ([], [], "")
        return new

    def cancel(self):
        self.cancelled = True


class Machine:
    context, kv_tokens = 100, 80
    broken = False

    def __init__(self):
        self.sequences = {}
        self.begun = []
        self.says = b"abc"
        self.end = "length"
        self.load = (0, 0.0)
        self.steps = 0

    def encode(self, add):
        if add.prompt == "crash":
            raise TypeError("whatever")
        if add.prompt == "bad":
            raise Wrong("that is no prompt", "prompt")
        return list(add.prompt.encode())

    def decode(self, lists):
        return [bytes(each).decode("utf-8", "ignore") for each in lists]

    def begin(self, key, ids, max_tokens, sampling):
        if self.broken:
            raise RuntimeError("whatever")
        self.begun.append((key, ids, max_tokens, sampling))
        self.sequences[key] = Sequence(self.says[:max_tokens], self.end)
        return self.sequences[key]

    def step(self):
        self.steps += 1
        live = [each for each in self.sequences.values() if each.says and not each.cancelled]
        self.load = (len(live), len(live) / 10)
        for each in live:
            each.advance()


@pytest.fixture
def machine():
    return Machine()


@pytest.fixture
def worker(machine):
    return Worker(machine)


def add(key, prompt="hello", tokens=3, stops=(), **sampling):
    return Add(key, prompt, [], tokens, list(stops), Sampling(**sampling))


def test_answers_grow_by_a_token_a_step(worker):
    assert worker.take(add(1)) == Accepted(1, 5)
    assert list(worker.step()) == [Stepped([Piece(1, "a", 1)], 1, 0, 0.1)]
    worker.take(add(2))
    assert list(worker.step()) == [Stepped([Piece(1, "b", 1), Piece(2, "a", 1)], 2, 0, 0.2)]
    assert list(worker.step()) == [Stepped([Piece(1, "c", 1, "length"), Piece(2, "b", 1)], 1, 0, 0.2)]
    assert list(worker.step()) == [Stepped([Piece(2, "c", 1, "length")], 0, 0, 0.0)]
    assert not worker.busy


def test_who_cancels_hears_nothing_more(worker, machine):
    worker.take(add(1))
    worker.take(add(2))
    assert worker.take(Cancel(1)) is None
    assert machine.sequences[1].cancelled
    assert [piece.key for piece in next(iter(worker.step())).pieces] == [2]
    worker.take(Cancel(1))  # once more, and one that never was
    worker.take(Cancel(9))


def test_a_ping_is_answered(worker):
    assert worker.take(Ping()) == Pong()
    assert not worker.busy


def test_a_stop_string_ends_the_sequence_in_the_engine(worker, machine):
    machine.says = b"one END two"
    worker.take(add(1, tokens=11, stops=["END"]))
    pieces = [piece for _ in range(7) for piece in next(iter(worker.step())).pieces]
    assert ("".join(piece.text for piece in pieces), pieces[-1].end, len(pieces)) == ("one ", "stop", 7)
    assert machine.sequences[1].cancelled
    assert not worker.busy


def test_the_end_of_the_model_is_stop(worker, machine):
    machine.end = "stop"
    worker.take(add(1, tokens=1))
    assert next(iter(worker.step())).pieces == [Piece(1, "a", 1, "stop")]


@pytest.mark.parametrize(
    ("request_", "field", "text"),
    [
        (add(1, prompt="bad"), "prompt", "that is no prompt"),
        (add(1, prompt="x" * 90, tokens=11), "max_tokens", "over the model's context, 100"),
        (add(1, prompt="x" * 70, tokens=11), "max_tokens", "over the KV cache, 80"),
        (add(1, prompt="x" * 100, tokens=None), "max_tokens", "over the model's context"),
    ],
)
def test_what_has_no_room_is_refused(worker, request_, field, text):
    refused = worker.take(request_)
    assert isinstance(refused, Refused)
    assert (refused.field, text in refused.why) == (field, True)
    assert not worker.busy


def test_a_request_that_the_runtime_fails_on_fails_alone(worker):
    worker.take(add(1))
    refused = worker.take(add(2, prompt="crash"))
    assert (refused.key, refused.field) == (2, "")
    assert [piece.key for piece in next(iter(worker.step())).pieces] == [1]


def test_without_a_limit_there_is_as_much_as_fits(worker, machine):
    machine.says = b"a" * 99
    worker.take(add(1, prompt="x" * 70, tokens=None))
    assert len(machine.sequences[1].says) == 10


def test_a_sequence_that_the_engine_lost_begins_again_with_its_tokens(worker, machine):
    machine.says, machine.end = b"ab\xc3", "lost"  # in the middle of a character
    worker.take(add(1, tokens=5, stops=["bx"], seed=7, min_tokens=4))
    pieces = [piece for _ in range(3) for piece in next(iter(worker.step())).pieces]
    assert machine.begun[-1] == (1, list(b"helloab\xc3"), 2, Sampling(seed=10, min_tokens=1))
    machine.sequences[1].says, machine.sequences[1].end = list(b"\xa4!"), "length"
    pieces += [piece for _ in range(2) for piece in next(iter(worker.step())).pieces]
    assert "".join(piece.text for piece in pieces) == "abä!"
    assert (pieces[-1].end, sum(piece.tokens for piece in pieces), worker.busy) == ("length", 5, False)


def test_one_without_tokens_begins_again_as_it_was(worker, machine):
    worker.take(add(1, tokens=3, seed=7))
    machine.sequences[1].new = ([], [], "lost")
    machine.sequences[1].says = []
    list(worker.step())
    assert machine.begun == [(1, list(b"hello"), 3, Sampling(seed=7))] * 2
    assert next(iter(worker.step())).pieces == [Piece(1, "a", 1)]


def test_a_sequence_that_is_lost_for_too_long_ends(machine):
    now = 0.0
    worker = Worker(machine, patience=60.0, clock=lambda: now)
    worker.take(add(1, tokens=9))

    def lose():
        machine.sequences[1].new, machine.sequences[1].says = ([], [], "lost"), []
        return list(worker.step())

    lose()
    now = 59.0
    lose()
    assert next(iter(worker.step())).pieces == [Piece(1, "a", 1)]  # there is room again
    lose()
    now = 118.0
    assert len(lose()) == 1
    now = 119.0
    refused, stepped = lose()
    assert (refused.key, refused.field, stepped.pieces, worker.busy) == (1, "", [], False)
    assert "no room for it for 60 s" in refused.why


def test_one_that_can_not_begin_again_ends(worker, machine):
    machine.end = "lost"
    worker.take(add(1, tokens=1))
    machine.broken = True
    refused, stepped = worker.step()
    assert (refused.key, refused.field, stepped.pieces) == (1, "", [])


def test_logprobs_come_with_their_tokens(worker):
    worker.take(add(1, tokens=1, logprobs=True))
    assert next(iter(worker.step())).pieces[0].logprobs == [Token("a", -0.5)]


def test_long_answers_in_characters_of_four_bytes(worker, machine):
    machine.says = ("😀" * 15).encode()
    worker.take(add(1, prompt="", tokens=60))
    text = ""
    while worker.busy:
        text += "".join(piece.text for piece in list(worker.step())[-1].pieces)
    assert text == "😀" * 15


@pytest.mark.parametrize(
    ("count", "cut"),
    [
        (len, None),  # tokens are letters
        (lambda text: 1 + len(text) // 3, None),  # words, after a token that begins every text
        (lambda text: len(text) // 60, None),  # 20 words in one
        (lambda text: min(len(text), 512), 512),
        (lambda text: min(len(text) // 60, 512), 512),
        (lambda text: min(len(text), 1000), None),  # the context is full then
        (lambda text: 1, None),  # all of it unknown
        (lambda text: 0, None),
    ],
)
def test_a_tokenizer_that_cuts_texts_is_found_out(count, cut):
    assert cut_at(count, 1000) == cut


def test_no_text_is_tried_that_is_longer_than_a_request():
    tried = []
    assert cut_at(lambda text: tried.append(len(text)) or len(text), 2**40) is None
    assert max(tried) < 2 * LARGEST_BODY


def test_it_serves_pipes_and_ends_with_its_input(machine):
    source, feed = os.pipe()
    drain, sink = os.pipe()
    request = frame(add(1)) + frame(add(2, prompt="bad"))
    os.write(feed, request)
    os.close(feed)
    serve(Worker(machine), source, sink)  # which gets all of it in one read, and then the end
    os.close(sink)
    with os.fdopen(drain, "rb") as said:
        replies = []
        while length := said.read(LENGTH):
            replies.append(read_reply(said.read(int.from_bytes(length, "little"))))
    os.close(source)
    assert replies[:2] == [Accepted(1, 5), Refused(2, "that is no prompt", "prompt")]
    assert replies[2:] == [Stepped([Piece(1, "a", 1)], 1, 0, 0.1)]


def test_a_large_request_is_read_at_once_beside_answers_under_way(machine):
    machine.says = b"a" * 60
    source, feed = os.pipe()
    drain, sink = os.pipe()
    asked = frame(add(1, tokens=60)) + frame(add(2, prompt="x" * (3 << 20))) + frame(add(3, prompt="bad"))
    replies = []

    def send():
        with os.fdopen(feed, "wb") as file:
            file.write(asked)
            file.flush()
            while len(replies) < 50:
                time.sleep(0.001)

    def hear():
        with os.fdopen(drain, "rb") as said:
            while length := said.read(LENGTH):
                replies.append(read_reply(said.read(int.from_bytes(length, "little"))))

    threads = [threading.Thread(target=send), threading.Thread(target=hear)]
    for thread in threads:
        thread.start()
    serve(Worker(machine), source, sink)
    os.close(sink)
    for thread in threads:
        thread.join()
    os.close(source)
    refused = [at for at, reply in enumerate(replies) if isinstance(reply, Refused)]
    assert len(refused) == 2
    assert sum(isinstance(reply, Stepped) for reply in replies[: refused[-1]]) <= 2
