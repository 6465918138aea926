from __future__ import annotations

import asyncio
import logging

import pytest
from things import POD, pod
from times import Quick

from carpool_operator.cluster import watching
from carpool_operator.cluster.kinds import KINDS, PODS
from carpool_operator.cluster.watching import LeftOut, Listing, Watch


class Seen:
    """Follows a watch, in the loop's thread, as a cache would."""

    def __init__(self, loop):
        self.pods = {}
        self.lists = 0
        self.events = []
        self.signs_of_life = 0
        self.told = asyncio.Event()
        self._loop = loop

    def listed(self, items, version):
        def take():
            self.lists += 1
            self.pods = {key.name: item[1] for key, item in items.items()}
            self.told.set()

        self._loop.call_soon_threadsafe(take)

    def seen(self, key, version, value):
        def take():
            self.events.append((key.name, value is not None))
            if value is None:
                self.pods.pop(key.name, None)
            else:
                self.pods[key.name] = value
            self.told.set()

        self._loop.call_soon_threadsafe(take)

    def alive(self):
        self.signs_of_life += 1


@pytest.fixture
async def seen(api):
    """A watch of pods that runs."""
    kube = api.kube()
    seen = Seen(asyncio.get_running_loop())
    kind = KINDS[PODS]
    watch = Watch(
        kube, Listing("/api/v1/pods", kind.query, kind.kept, LeftOut(PODS)), seen,
        log=logging.getLogger("test"), random=Quick(),
    )  # fmt: skip
    api.put(*POD, pod("first"))
    api.put(*POD, pod("other", injected=False))
    watch.start()
    await api.until(lambda: len(api.watchers) == 1)
    yield seen
    watch.stop()
    api.end_watches()
    kube.close()


async def settled(seen, test):
    """Wait until what the thread hands over has arrived."""
    async with asyncio.timeout(20):
        while not test():
            seen.told.clear()
            await seen.told.wait()


async def test_it_lists_then_follows(api, seen):
    await settled(seen, lambda: set(seen.pods) == {"first"})
    api.put(*POD, pod("second"))
    api.put(*POD, pod("first", ready=False))
    await settled(seen, lambda: len(seen.events) == 2)

    assert set(seen.pods) == {"first", "second"}
    assert not seen.pods["first"].ready
    api.remove(*POD, "second")
    await settled(seen, lambda: set(seen.pods) == {"first"})
    assert seen.lists == 1


async def test_only_what_is_labelled_is_asked_for(api, seen):
    api.put(*POD, pod("without", injected=False))
    api.put(*POD, pod("with"))
    await settled(seen, lambda: "with" in seen.pods)

    assert all(name != "without" for name, _ in seen.events)


async def test_a_watch_that_ends_goes_on_where_it_was(api, seen):
    await settled(seen, lambda: seen.lists == 1)
    api.bookmark()
    api.end_watches()
    await api.until(lambda: len(api.watchers) == 0)
    api.put(*POD, pod("meanwhile"))

    await settled(seen, lambda: "meanwhile" in seen.pods)
    assert seen.lists == 1


async def test_after_410_all_is_listed_again(api, seen):
    await settled(seen, lambda: seen.lists == 1)
    api.muted.add("pods")  # no event reports what happens in the gap
    api.remove(*POD, "first")
    api.put(*POD, pod("second"))
    api.muted.clear()
    api.expire()

    await settled(seen, lambda: seen.lists == 2)
    assert set(seen.pods) == {"second"}


@pytest.mark.parametrize("fault", [{"status": 500}, {"status": 429, "retry_after": "0"}, {"drop": True}])
async def test_it_goes_on_after_failures(api, seen, fault):
    await settled(seen, lambda: seen.lists == 1)
    api.fail("WATCH /api/v1/pods", times=3, **fault)
    api.end_watches()
    api.put(*POD, pod("second"))

    await settled(seen, lambda: "second" in seen.pods)


async def test_what_makes_no_sense_ends_no_watch(api, seen):
    await settled(seen, lambda: seen.lists == 1)
    api.babble()

    await settled(seen, lambda: seen.lists == 2)
    api.put(*POD, pod("second"))
    await settled(seen, lambda: "second" in seen.pods)


async def test_a_list_is_read_page_by_page(api, monkeypatch):
    monkeypatch.setattr(watching, "PAGE", 2)
    for number in range(5):
        api.put(*POD, pod(f"pod-{number}"))
    kube = api.kube()
    kind = KINDS[PODS]

    items, version = await asyncio.to_thread(Listing("/api/v1/pods", kind.query, kind.kept, LeftOut(PODS)).read, kube)

    assert sorted(key.name for key in items) == [f"pod-{number}" for number in range(5)]
    assert version == api.version
    assert sum(line == "GET /api/v1/pods" for line in api.log) == 3
    kube.close()


async def test_a_pod_that_ended_is_as_good_as_gone(api, seen):
    await settled(seen, lambda: set(seen.pods) == {"first"})
    ended = pod("first")
    ended["status"]["phase"] = "Succeeded"
    api.put(*POD, ended)

    await settled(seen, lambda: seen.events == [("first", False)])
    assert seen.pods == {}


async def test_an_object_that_does_not_read_costs_no_other(api, seen, caplog):
    await settled(seen, lambda: set(seen.pods) == {"first"})
    odd = pod("odd")
    odd["metadata"]["annotations"] = None
    api.put(*POD, odd)
    api.put(*POD, pod("second"))
    await settled(seen, lambda: "second" in seen.pods)
    assert set(seen.pods) == {"first", "second"}
    kind = KINDS[PODS]
    kube = api.kube()
    items, _ = await asyncio.to_thread(Listing("/api/v1/pods", kind.query, kind.kept, LeftOut(PODS)).read, kube)
    kube.close()
    assert {key.name for key in items} == {"first", "second"}
    assert seen.lists == 1
    assert {record.object for record in caplog.records if record.message == "an object is left out"} == {"odd"}


async def test_an_object_that_does_not_read_is_logged_once_until_it_has_another_problem(api, caplog):
    kind, left_out, kube = KINDS[PODS], LeftOut(PODS), api.kube()

    async def logged():
        caplog.clear()
        await asyncio.to_thread(Listing("/api/v1/pods", kind.query, kind.kept, left_out).read, kube)
        lines = [each for each in caplog.records if each.message == "an object is left out"]
        return [(each.kind, each.namespace, each.object) for each in lines]

    odd, other = pod("odd"), pod("other")
    odd["metadata"]["annotations"] = other["metadata"]["annotations"] = None
    api.put(*POD, odd)
    api.put(*POD, other)
    assert await logged() == [("pods", "ns", "odd"), ("pods", "ns", "other")]
    api.put(*POD, odd)  # at another version
    assert await logged() == []
    odd["metadata"]["labels"]["x"] = 1
    odd["metadata"]["annotations"] = {}
    api.put(*POD, odd)
    assert await logged() == [("pods", "ns", "odd")]
    api.put(*POD, pod("odd"))
    assert await logged() == []
    api.put(*POD, odd)
    assert await logged() == [("pods", "ns", "odd")]
    kube.close()


def test_no_more_problems_are_remembered_than_there_is_room_for(monkeypatch, caplog):
    monkeypatch.setattr(watching, "REMEMBERED", 2)
    left_out = LeftOut(PODS)
    for name in ("a", "b", "a", "c", "a", "b"):
        left_out.report({"name": name}, ValueError("odd"))
    assert [record.object for record in caplog.records] == ["a", "b", "c", "b"]
