from __future__ import annotations

import asyncio
import json

import pytest

from carpool.policy.spec import Axis, Model
from carpool_sidecar import models
from carpool_sidecar.backends.base import Document
from carpool_sidecar.models import LONGEST, MAX_ENTRIES, OTHER, ModelTable, Resolver
from carpool_sidecar.protocols.common import Endpoint
from carpool_sidecar.protocols.models import Axis as BatchAxis


def endpoint(model, version=""):
    return Endpoint("v2", model, version, b"/")


def metadata(shape, **fields):
    tensor = {"name": "x", "datatype": "FP32", "shape": shape}
    return json.dumps({"name": "m", "inputs": [tensor], "outputs": [tensor], **fields}).encode()


class Server:
    def __init__(self, **documents):
        self.documents = documents
        self.known = None
        self.asked = []

    def axis(self, model):
        return self.known

    async def ask(self, target):
        self.asked.append(target)
        return self.documents.get(target.rpartition(b"/")[2].decode(), Document(404))


@pytest.fixture
def forgotten():
    return []


class Resolving:
    """A resolver, and what it reported."""

    def __init__(self, table, server):
        self.learned, self.changed = [], []
        made = Resolver(table, server, self.learned.append, self.changed.append)
        self.resolve, self.run = made.resolve, made.run


async def test_v1_is_batched_at_once_and_v2_when_the_axis_is_known(forgotten):
    table = ModelTable([], forgotten.append)
    entry = table.entry(endpoint("m"))
    assert (entry.alone_by_protocol, entry.alone) == (None, "axis-unknown")
    made = Resolving(table, Server(m=Document(200, metadata([-1, 3]))))
    await made.resolve(entry)
    assert entry.alone is None
    assert made.learned == [entry]
    await made.resolve(entry)
    assert (made.learned, made.changed) == ([entry], [])


async def test_a_fixed_first_dimension_prevents_batching_and_the_reason_says_how_to_change_that(forgotten):
    table = ModelTable([], forgotten.append)
    entry = table.entry(endpoint("m"))
    await Resolving(table, Server(m=Document(200, metadata([1, 3])))).resolve(entry)
    assert entry.alone == "axis-none"
    assert "axis: First" in entry.reason


async def test_the_largest_batch_is_read_from_triton(forgotten):
    table = ModelTable([Model(name="m", max_batch=16)], forgotten.append)
    entry = table.entry(endpoint("m", "3"))
    server = Server(
        **{"3": Document(200, metadata([-1, 3])), "config": Document(200, b'{"name":"m","max_batch_size":4}')}
    )
    assert table.cap("m") == 16
    await Resolving(table, server).resolve(entry)
    assert (entry.max_batch, table.cap("m"), table.cap("n")) == (4, 4, None)
    assert server.asked == [b"/v2/models/m/versions/3", b"/v2/models/m/versions/3/config"]


@pytest.mark.parametrize("status", [0, 429, 503])
async def test_a_largest_batch_that_was_known_outlives_a_configuration_without_an_answer(forgotten, status):
    table = ModelTable([], forgotten.append)
    entry = table.entry(endpoint("m"))
    server = Server(m=Document(200, metadata([-1, 3])), config=Document(200, b'{"name":"m","max_batch_size":8}'))
    made = Resolving(table, server)
    await made.resolve(entry)
    assert entry.max_batch == 8
    server.documents["config"] = Document(status)
    await made.resolve(entry)
    assert entry.max_batch == 8
    server.documents["config"] = Document(404)
    await made.resolve(entry)
    assert entry.max_batch is None


async def test_the_policy_goes_before_what_the_server_says(forgotten):
    table = ModelTable([Model(name="a", axis=Axis.FIRST), Model(name="b", axis=Axis.NONE)], forgotten.append)
    a, b = table.entry(endpoint("a")), table.entry(endpoint("b"))
    assert (a.alone, a.alone_by_protocol) == (None, None)
    assert (b.alone, b.alone_by_protocol) == ("axis-none", "axis-none")
    made = Resolving(table, Server(a=Document(200, metadata([1])), b=Document(200, metadata([-1]))))
    await made.resolve(a)
    await made.resolve(b)
    assert (a.alone, b.alone) == (None, "axis-none")
    table.configure([])
    assert (a.alone, b.alone, b.alone_by_protocol) == ("axis-none", None, None)


async def test_what_the_backend_knows_of_the_axis_goes_before_metadata(forgotten):
    table = ModelTable([], forgotten.append)
    entry = table.entry(endpoint("m"))
    server = Server(m=Document(200, metadata([-1, 3])))
    server.known = BatchAxis("None", None, "dim 0 is named 'time': export it as 'batch'")
    await Resolving(table, server).resolve(entry)
    assert (entry.alone, entry.reason) == ("axis-none", "dim 0 is named 'time': export it as 'batch'")
    assert server.asked == [b"/v2/models/m"]


async def test_what_was_refuted_is_not_merged_unless_the_policy_says_so(forgotten):
    table = ModelTable([], forgotten.append)
    entry = table.entry(endpoint("m"))
    await Resolving(table, Server(m=Document(200, metadata([-1, 3])))).resolve(entry)
    entry.record.disagreed = "row 0: 1 alone, 2 in a batch"
    entry.configure(None)
    assert (entry.alone, entry.alone_by_protocol) == ("axis-refuted", "axis-refuted")
    for axis, alone in ((Axis.FIRST, None), (Axis.NONE, "axis-none"), (Axis.AUTO, "axis-refuted")):
        table.configure([Model(name="m", axis=axis)])
        assert (entry.alone, entry.alone_by_protocol) == (alone, alone)


@pytest.mark.parametrize("answer", [Document(0), Document(503), Document(400)])
async def test_a_server_that_is_not_ready_says_nothing(forgotten, answer):
    table = ModelTable([], forgotten.append)
    entry = table.entry(endpoint("m"))
    made = Resolving(table, Server(m=answer))
    await made.resolve(entry)
    assert (entry.alone, made.learned) == ("axis-unknown", [])


async def test_a_server_without_metadata_leaves_the_axis_to_the_policy(forgotten):
    table = ModelTable([], forgotten.append)
    entry = table.entry(endpoint("m"))
    await Resolving(table, Server()).resolve(entry)
    assert entry.alone == "axis-none"
    assert "axis: First" in entry.reason


async def test_a_name_in_the_policy_that_the_server_does_not_know_is_doubted_once_others_are_answered(forgotten):
    table = ModelTable([Model(name="typo", axis=Axis.FIRST), Model(name="described")], forgotten.append)
    typo, described, used = (table.entry(endpoint(name)) for name in ("typo", "described", "used"))
    made = Resolving(table, Server(described=Document(200, metadata([-1, 3]))))
    for entry in (typo, described, used):
        await made.resolve(entry)
    assert table.reason(typo) == "the policy says axis First"
    used.known.proven = True
    assert table.reason(typo) == (
        "the policy says axis First, but the server does not describe it and only answered for used: check its name"
    )
    assert (table.reason(described), table.reason(used)) == (described.reason, used.reason)
    table.entry(endpoint("typo", "1")).known.proven = True
    assert table.reason(typo) == "the policy says axis First"


async def test_another_version_is_reported_and_the_same_in_other_words_is_not(forgotten):
    table = ModelTable([], forgotten.append)
    entry = table.entry(endpoint("m"))
    server = Server(m=Document(200, metadata([-1, 3], versions=["1"])))
    made = Resolving(table, server)
    await made.resolve(entry)
    server.documents["m"] = Document(200, metadata([-1, 3], versions=["1"], extra=1))
    await made.resolve(entry)
    assert made.changed == []
    server.documents["m"] = Document(200, metadata([-1, 3], versions=["2"]))
    await made.resolve(entry)
    assert made.changed == [entry]


async def test_names_that_never_worked_make_room_and_those_that_did_stay(forgotten):
    table = ModelTable([], forgotten.append)
    good = table.entry(endpoint("good"))
    good.known.proven = True
    for number in range(2 * MAX_ENTRIES):
        table.entry(endpoint(f"made-up-{number}"))
    assert len(list(table)) == MAX_ENTRIES
    assert table.entry(endpoint("good")) is good
    assert len(forgotten) == MAX_ENTRIES + 1
    assert (table.label("good"), table.label("made-up-0")) == ("good", OTHER)


async def test_names_that_the_policy_knows_stay(forgotten):
    table = ModelTable([Model(name="kept")], forgotten.append)
    kept = table.entry(endpoint("kept"))
    for number in range(2 * MAX_ENTRIES):
        table.entry(endpoint(f"made-up-{number}"))
    table.missing(kept)
    assert table.entry(endpoint("kept")) is kept


async def test_without_room_requests_are_sent_alone_under_another_name(forgotten):
    table = ModelTable([], forgotten.append)
    for number in range(MAX_ENTRIES):
        table.entry(endpoint(f"{number}")).known.proven = True
    entry = table.entry(endpoint("one-more"))
    assert (entry.lane, entry.alone, entry.alone_by_protocol) == (OTHER, "too-many-models", "too-many-models")


async def test_without_room_models_that_were_unloaded_make_some_the_oldest_first(forgotten):
    table = ModelTable([Model(name="configured")], forgotten.append)
    entries = [table.entry(endpoint(name)) for name in ("configured", "waits", "reloaded", "old", "later")]
    entries += [table.entry(endpoint(f"{number}")) for number in range(MAX_ENTRIES - len(entries))]
    for entry in entries:
        entry.answered()
    for entry in entries[4::-1]:
        table.missing(entry)
    entries[1].waiters = 1
    entries[2].answered()
    assert forgotten == []
    for name in ("new", "newer"):
        table.entry(endpoint(name)).answered()
    assert forgotten == ["old", "later"]
    for entry in table:
        entry.answered()
    assert table.entry(endpoint("one-more")).lane == OTHER


@pytest.mark.parametrize("name", ["m" * (LONGEST - 1), "\u00e9" * (LONGEST // 2)])
async def test_long_names_have_no_entry_of_their_own_unless_the_policy_knows_them(forgotten, name):
    table = ModelTable([], forgotten.append)
    assert table.entry(endpoint(name)).lane == name
    assert table.entry(endpoint(name, "12")).lane == OTHER
    assert table.entry(endpoint(name + "mm")).lane == OTHER
    assert len(list(table)) == 1
    table.configure([Model(name="\u00e9" * 253)])
    assert table.entry(endpoint("\u00e9" * 253)).lane == "\u00e9" * 253


async def test_a_lane_is_forgotten_with_the_last_version_that_uses_it(forgotten):
    table = ModelTable([], forgotten.append)
    one, two = table.entry(endpoint("m", "1")), table.entry(endpoint("m", "2"))
    table.missing(one)
    assert forgotten == []
    table.missing(two)
    assert forgotten == ["m"]
    proven = table.entry(endpoint("n"))
    proven.known.proven = True
    table.missing(proven)
    assert list(table) == [proven]


async def test_a_model_is_not_forgotten_while_its_requests_wait(forgotten):
    table = ModelTable([], forgotten.append)
    ridden = table.entry(endpoint("ridden"))
    ridden.waiters = 2
    for number in range(MAX_ENTRIES):
        table.entry(endpoint(f"m{number}"))
    table.missing(ridden)
    assert (ridden in table, forgotten) == (True, ["m0"])
    table.left(ridden)
    assert ridden in table
    table.left(ridden)
    assert (ridden in table, forgotten) == (False, ["m0", "ridden"])


async def test_the_background_asks_about_what_is_new_and_then_again(forgotten, wait_until):
    table = ModelTable([Model(name="early")], forgotten.append)
    server = Server(early=Document(200, metadata([-1])), late=Document(200, metadata([-1])))
    made = Resolving(table, server)
    task = asyncio.create_task(made.run())
    await wait_until(lambda: len(made.learned) == 1)
    table.entry(endpoint("late"))
    await wait_until(lambda: len(made.learned) == 2)
    asked = len(server.asked)
    table.ask_again()
    await wait_until(lambda: len(server.asked) == asked + 4)
    task.cancel()


async def test_a_client_with_wrong_names_does_not_keep_the_others_from_being_asked_about(
    forgotten, wait_until, monkeypatch
):
    monkeypatch.setattr(models, "SOON", 0.02)
    monkeypatch.setattr(models, "REFRESH", 0.04)
    table = ModelTable([Model(name="good")], forgotten.append)
    server = Server(good=Document(200, metadata([-1])))
    made = Resolving(table, server)
    task = asyncio.create_task(made.run())

    async def stray():
        for number in range(1000):
            table.missing(table.entry(endpoint(f"wrong-{number}")))
            await asyncio.sleep(0.001)

    stranger = asyncio.create_task(stray())
    await wait_until(lambda: server.asked.count(b"/v2/models/good") > 3)
    assert not stranger.done()
    task.cancel()
    stranger.cancel()


@pytest.mark.parametrize("body", [b'{"name": "caf\xe9"}', b"[" * 100_000])
async def test_metadata_that_can_not_be_read_end_nothing(forgotten, wait_until, body):
    table = ModelTable([Model(name="odd")], forgotten.append)
    made = Resolving(table, Server(odd=Document(200, body), good=Document(200, metadata([-1]))))
    task = asyncio.create_task(made.run())
    await wait_until(lambda: table.entry(endpoint("odd")).known.axis is not None)
    assert table.entry(endpoint("good")).alone == "axis-unknown"
    await wait_until(lambda: table.entry(endpoint("good")).alone is None)
    task.cancel()


async def test_a_server_that_does_not_describe_a_model_yet_is_asked_again_soon(forgotten, wait_until, monkeypatch):
    monkeypatch.setattr(models, "SOON", 0.01)
    table = ModelTable([Model(name="known"), Model(name="other"), Model(name="loading")], forgotten.append)
    server = Server(known=Document(200, metadata([-1])), other=Document(400), loading=Document(503))
    made = Resolving(table, server)
    task = asyncio.create_task(made.run())
    await wait_until(lambda: server.asked.count(b"/v2/models/loading") > 3)
    known, loading = table.entry(endpoint("known")), table.entry(endpoint("loading"))
    assert server.asked.count(b"/v2/models/known") == 1, "only every 30 s"
    assert server.asked.count(b"/v2/models/other") == 1, "it will say no more"
    assert loading.reason == "the server answers /v2/models/loading with 503, so its batch axis is not known yet"
    server.documents["loading"] = Document(200, metadata([-1]))
    await wait_until(lambda: made.learned == [known, loading])
    asked = len(server.asked)
    await asyncio.sleep(0.05)
    assert len(server.asked) == asked
    task.cancel()
