from __future__ import annotations

import asyncio

import aiohttp
import msgspec
import pytest
from fake_pod import WALL
from things import CONFIG_MAP, POLICY, as_kept, pod, policy

from carpool.exchange.change import Change
from carpool.policy.parameters import Parameters
from carpool_operator.api.model import Target
from carpool_operator.cluster.kube import ApiError
from carpool_operator.cluster.objects import RawPod, RawPolicy
from carpool_operator.cluster.writing import Writer
from carpool_operator.delivery import publishing
from carpool_operator.delivery.publishing import ConfigMaps, Published, Pusher, address, config_map
from carpool_operator.delivery.signing import Signer, new_key
from carpool_operator.workloads.metadata import Key

TARGET = Target("ns", "Deployment", "web")
KEY = Key("ns", "carpool-deployment-web")


def change(generation=7):
    return Change(target=str(TARGET), generation=generation, expires=WALL + 100, parameters={"*": Parameters()})


@pytest.fixture
def maps(writer, signer):
    return ConfigMaps(writer, signer)


def published(signer, generation=7, owner="uid-p"):
    body, signature = signer.sign(change(generation))
    return Published(body.decode(), signature, owner)


def owner(api, name="p"):
    return as_kept(RawPolicy, api.get(*POLICY, name) or api.put(*POLICY, policy(name)))


def test_its_name_is_made_of_kind_and_name():
    assert config_map(Target("ns", "StatefulSet", "db")) == ("ns", "carpool-statefulset-db")


async def test_it_is_written_once_and_read_back_after_a_restart(api, maps, signer):
    wanted = published(signer)
    assert maps.differs(TARGET, wanted)
    await maps.write(TARGET, wanted, owner(api))
    assert not maps.differs(TARGET, wanted)

    kube = api.kube()
    again = ConfigMaps(Writer(kube, lambda: True), signer)
    await again.read([None])

    assert again.change(TARGET, WALL) == change()
    assert again.owner(KEY) == api.get(*POLICY, "p")["metadata"]["uid"]
    assert again.keys() == [KEY]
    kube.close()


async def test_what_others_put_there_is_not_believed(api, maps, signer):
    await maps.write(TARGET, published(signer), owner(api))
    there = api.get(*CONFIG_MAP, KEY.name)
    forged = there["data"]["change.json"].replace('"generation":7', '"generation":9')

    api.put(*CONFIG_MAP, {**there, "data": {**there["data"], "change.json": forged}})
    await maps.read(["ns"])
    assert maps.change(TARGET, WALL) is None
    assert maps.differs(TARGET, published(signer))

    elsewhere = {"metadata": {"name": "carpool-deployment-other", "labels": there["metadata"]["labels"]}}
    api.put(*CONFIG_MAP, {**elsewhere, "data": there["data"]})  # a copy, of another target
    await maps.read(["ns"])
    assert maps.change(Target("ns", "Deployment", "other"), WALL) is None
    assert maps.change(Target("ns", "Deployment", "none at all"), WALL) is None


async def test_one_that_expired_is_not_gone_on_from(api, maps, signer):
    """No sidecar would take it; signed anew, because somebody put it back, all would."""
    await maps.write(TARGET, published(signer), owner(api))

    assert maps.change(TARGET, WALL + 99) == change()
    assert maps.change(TARGET, WALL + 100) is None


async def test_those_of_a_namespace_that_can_not_be_read_stay_as_they_were(api, maps, signer):
    await maps.write(TARGET, published(signer), owner(api))
    elsewhere = {
        **api.get(*CONFIG_MAP, KEY.name),
        "metadata": {"name": "other", "labels": {"carpool.dev/change": "true"}},
    }
    api.put(*CONFIG_MAP, elsewhere, "b")
    api.close("ns")
    api.put(*CONFIG_MAP, {**elsewhere, "metadata": {**elsewhere["metadata"], "name": "new"}}, "b")

    await maps.read(["ns", "b"])

    assert sorted(maps.keys()) == [Key("b", "new"), Key("b", "other"), KEY]
    assert maps.change(TARGET, WALL) == change()
    api.close("b")
    with pytest.raises(ApiError):
        await maps.read(["ns", "b"])
    with pytest.raises(ApiError):
        await maps.read(["b"])


async def test_another_owner_is_a_difference(api, maps, signer):
    await maps.write(TARGET, published(signer), owner(api))

    assert maps.differs(TARGET, published(signer, owner="uid-of-another"))


async def test_one_of_that_name_that_others_made_is_taken_over(api, maps, signer):
    api.put(*CONFIG_MAP, {"metadata": {"name": KEY.name}, "data": {"theirs": "stays"}})

    await maps.write(TARGET, published(signer), owner(api))

    assert api.get(*CONFIG_MAP, KEY.name)["data"]["theirs"] == "stays"
    await maps.read([None])
    assert maps.change(TARGET, WALL) == change()


async def test_it_is_removed_only_as_what_it_was(api, maps, signer):
    await maps.write(TARGET, published(signer), owner(api))
    api.remove(*CONFIG_MAP, KEY.name)
    api.put(*CONFIG_MAP, {"metadata": {"name": KEY.name}, "data": {"somebody": "else's"}})

    await maps.remove(KEY)
    assert api.get(*CONFIG_MAP, KEY.name) is not None
    assert maps.keys() == []


async def test_what_a_list_found_gone_since_is_not_removed_again(api, maps, signer):
    """Deciding that nobody wants it and deleting it are two moments, and a list may come between."""
    await maps.write(TARGET, published(signer), owner(api))
    api.remove(*CONFIG_MAP, KEY.name)
    await maps.read([None])
    api.log.clear()

    await maps.remove(KEY)

    assert not [line for line in api.log if line.startswith("DELETE")]


async def test_writes_and_deletions_that_fail_are_reported(api, maps, signer):
    api.fail("PATCH", 500)
    with pytest.raises(ApiError):
        await maps.write(TARGET, published(signer), owner(api))
    assert maps.differs(TARGET, published(signer))

    await maps.write(TARGET, published(signer), owner(api))
    api.fail("DELETE", 500)
    with pytest.raises(ApiError):
        await maps.remove(KEY)
    assert maps.keys() == [KEY]


# ------------------------------------------------------------------------------------------- to the pods


@pytest.fixture
async def session():
    async with aiohttp.ClientSession() as one:
        yield one


def at(sidecar):
    return msgspec.structs.replace(as_kept(RawPod, pod()), admin_port=sidecar.port)


async def test_a_pod_takes_what_is_pushed(sidecar, session, signer):
    pusher = Pusher(session, asyncio.Semaphore(1))

    assert await pusher.push(at(sidecar), *signer.sign(change())) == ""
    assert sidecar.changes == [change()]


async def test_a_refusal_is_reported_in_its_own_words(sidecar, session, signer):
    pusher = Pusher(session, asyncio.Semaphore(1))
    other = Signer(new_key())

    answer = await pusher.push(at(sidecar), *other.sign(change()))

    assert answer.startswith("it answers 403: ")
    assert "signature" in answer


async def test_a_pod_that_is_gone_or_slow_is_reported(sidecar, session, signer, monkeypatch):
    pusher = Pusher(session, asyncio.Semaphore(1))
    sidecar.stall = asyncio.Event()

    with monkeypatch.context() as patch:
        patch.setattr(publishing, "PUSH", 0.05)
        assert await pusher.push(at(sidecar), *signer.sign(change())) == "no answer within 0.05 s"
    sidecar.stall.set()
    await sidecar.stop()
    assert "onnect" in await pusher.push(at(sidecar), *signer.sign(change()))


def test_addresses():
    one = as_kept(RawPod, pod(ip="10.244.0.7"))

    assert address(one) == "10.244.0.7:14090"
    assert address(msgspec.structs.replace(one, ip="fd00::7")) == "[fd00::7]:14090"
