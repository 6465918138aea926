from __future__ import annotations

import json
from base64 import b64decode, b64encode

import pytest

from carpool_operator.cluster.kube import ApiError
from carpool_operator.webhook import store
from carpool_operator.webhook.certificates import LIFE, SETTLE, read

NAMES = store.Names("carpool-system")
NOW = 1_800_000_000.0
HELD = "/api/v1/namespaces/carpool-system/secrets/carpool-injector-cert"
HOOK = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/carpool-injector"
MAP = "/api/v1/namespaces/carpool-system/configmaps/carpool-public-key"


class Objects:
    """An API server's objects, with their versions."""

    def __init__(self):
        webhooks = [{"name": name, "clientConfig": {"service": {}}} for name in ("deployments", "pods")]
        self.objects = {HOOK: {"metadata": {"resourceVersion": "1"}, "webhooks": webhooks}}
        self.writes = []
        self.before_write = lambda: None

    async def request(self, method, path, body=None, *, content="application/json"):
        if method != "GET":
            self.before_write()
            self.writes.append((method, path))
        if method == "POST":
            path = f"{path}/{body['metadata']['name']}"
            if path in self.objects:
                raise ApiError(409, "exists")
            body["metadata"]["resourceVersion"] = "1"
            self.objects[path] = body
        found = self.objects.get(path)
        if found is None:
            raise ApiError(404, f"{path} not found")
        metadata = found["metadata"]
        if method == "PUT":
            if body["metadata"]["resourceVersion"] != metadata["resourceVersion"]:
                raise ApiError(409, "conflict")
            self.objects[path] = body
        if method == "PATCH":
            assert content == "application/json-patch+json"
            for each in body:
                _, _, index, *rest = each["path"].split("/")
                webhook = found["webhooks"][int(index)]
                if each["op"] == "test":
                    assert webhook["name"] == each["value"]
                else:
                    webhook[rest[0]][rest[1]] = each["value"]
        if method in {"PUT", "PATCH"}:
            self.objects[path]["metadata"]["resourceVersion"] = str(int(metadata["resourceVersion"]) + 1)
        return json.dumps(self.objects[path]).encode()

    @property
    def held(self):
        return read({key: b64decode(value) for key, value in self.objects[HELD]["data"].items()})

    @property
    def trusted(self):
        return [b64decode(each["clientConfig"].get("caBundle", "")) for each in self.objects[HOOK]["webhooks"]]


async def test_the_first_look_makes_it_and_the_next_writes_nothing():
    server = Objects()
    made = await store.material(server, NAMES, NOW)
    assert server.held == made
    assert server.trusted == [made.bundle] * 2
    server.writes.clear()
    assert await store.material(server, NAMES, NOW + LIFE / 2) == made
    assert server.writes == []


async def test_of_two_that_make_it_at_once_the_first_wins():
    server = Objects()

    def other_wins():
        server.before_write = lambda: None
        server.objects[HELD] = {
            "metadata": {"resourceVersion": "7"},
            "data": {key: b64encode(value).decode() for key, value in others.secret().items()},
        }

    others = await store.material(Objects(), NAMES, NOW)
    server.before_write = other_wins
    assert await store.material(server, NAMES, NOW) == others
    assert server.trusted == [others.bundle] * 2


async def test_of_two_that_renew_it_at_once_the_first_wins():
    server = Objects()
    first = await store.material(server, NAMES, NOW)
    late = NOW + LIFE + 1

    def other_wins():
        server.before_write = lambda: None
        server.objects[HELD]["metadata"]["resourceVersion"] = "9"
        server.objects[HELD]["data"] = {key: b64encode(value).decode() for key, value in others.secret().items()}

    others = await store.material(Objects(), NAMES, late)
    server.before_write = other_wins
    assert await store.material(server, NAMES, late) == others != first


async def test_a_race_that_is_always_lost_is_reported():
    server = Objects()
    await store.material(server, NAMES, NOW)

    def lose():
        server.objects[HELD]["metadata"]["resourceVersion"] += "0"

    server.before_write = lose
    with pytest.raises(ApiError, match="lost 5 races"):
        await store.material(server, NAMES, NOW + LIFE + 1)


async def test_it_is_announced_before_it_is_served():
    server = Objects()
    first = await store.material(server, NAMES, NOW)
    due = NOW + LIFE * 0.7
    announced = await store.material(server, NAMES, due)
    assert announced.current == first.current
    assert server.trusted == [announced.bundle] * 2
    # Somebody took the announcement back: said again, and served one look later.
    server.objects[HOOK]["webhooks"][1]["clientConfig"]["caBundle"] = ""
    assert (await store.material(server, NAMES, due + SETTLE)).current == first.current
    assert server.trusted == [announced.bundle] * 2
    assert (await store.material(server, NAMES, due + SETTLE)).current == announced.following


async def test_what_was_taken_away_comes_back():
    server = Objects()
    first = await store.material(server, NAMES, NOW)
    server.objects[HOOK]["webhooks"].append({"name": "third", "clientConfig": {"caBundle": "AAAA"}})
    assert await store.material(server, NAMES, NOW) == first
    assert server.trusted == [first.bundle] * 3
    del server.objects[HELD]
    second = await store.material(server, NAMES, NOW)
    assert server.trusted == [second.bundle] * 3
    server.objects[HELD]["data"] = {}
    third = await store.material(server, NAMES, NOW)
    assert (server.held, server.trusted) == (third, [third.bundle] * 3)


async def test_an_expired_one_heals():
    server = Objects()
    await store.material(server, NAMES, NOW)
    late = NOW + 3 * LIFE
    healed = await store.material(server, NAMES, late)
    assert healed.current.serves(NAMES.dns, late)
    assert server.trusted == [healed.bundle] * 2


async def test_faults_are_reported():
    server = Objects()
    del server.objects[HOOK]
    with pytest.raises(ApiError, match="not found"):
        await store.material(server, NAMES, NOW)
    assert server.held.current.serves(NAMES.dns, NOW), "made already, and kept"


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"publicKey": "AB" * 32 + "\n"}, "ab" * 32),
        ({"publicKey": "AB" * 32 + "," + "cd" * 32}, "ab" * 32 + "," + "cd" * 32),
        ({"publicKey": "ab" * 32 + ","}, None),
        ({"publicKey": "ab"}, None),
        ({"publicKey": "x" * 64}, None),
        ({}, None),
    ],
)
async def test_the_public_key_is_read(data, key):
    server = Objects()
    server.objects[MAP] = {"metadata": {}, "data": data}
    assert await store.public_key(server, NAMES) == key


async def test_without_an_operator_there_is_no_public_key():
    assert await store.public_key(Objects(), NAMES) is None
