"""The fault proxy does to its clients what a test asks for, and nothing else."""

from __future__ import annotations

import threading
import time
from contextlib import closing

import pytest
from minicluster.api import Api
from minicluster.client import ApiError
from minicluster.faults import FaultProxy


@pytest.fixture
def proxy(cluster):
    with FaultProxy(cluster) as one:
        yield one


@pytest.fixture
def through(cluster, proxy, api):
    with closing(Api.of(proxy.kubeconfig(api.token))) as one:
        yield one


def config(name="one", **data):
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def test_without_faults_it_is_not_there(through, proxy, namespace, cluster, api):
    through.apply(config(a="1"), namespace=namespace)
    file = str(proxy.kubeconfig(api.token, namespace))

    assert through.get("configmaps", "one", namespace)["data"] == {"a": "1"}
    assert cluster.run("kubectl", "--kubeconfig", file, "get", "cm", "one", "-o", "jsonpath={.data.a}") == "1"
    assert [(one.method, one.path) for one in proxy.writes] == [
        ("PATCH", f"/api/v1/namespaces/{namespace}/configmaps/one")
    ]


def test_it_refuses_what_a_test_asks_for_and_as_often(through, proxy, namespace):
    fault = proxy.refuse(409, methods="PATCH", path="configmaps", times=2, after=1)

    through.apply(config(a="1"), namespace=namespace)
    for _ in range(2):
        with pytest.raises(ApiError, match="409 Conflict"):
            through.apply(config(a="2"), namespace=namespace)
    assert through.get("configmaps", "one", namespace)["data"] == {"a": "1"}
    through.apply(config(a="3"), namespace=namespace)
    assert fault.struck == 2
    assert len(proxy.writes) == 2


def test_it_is_slow(through, proxy, namespace):
    fault = proxy.delay(0.2, path="configmaps")
    began = time.monotonic()

    through.find("configmaps", namespace)

    assert fault.struck == 1
    assert time.monotonic() - began >= 0.2  # at least: a lower bound holds on any machine


def test_it_reports_a_write_before_its_client_gets_the_answer(through, proxy, namespace, api):
    seen = []

    def look(request):
        seen.append((request.method, through_thread.is_alive()))

    proxy.after_write(look, path="configmaps", after=1)
    through_thread = threading.Thread(target=lambda: [through.create(config(str(i)), namespace) for i in range(3)])
    through_thread.start()
    through_thread.join(60)

    assert seen == [("POST", True)]
    assert len(proxy.writes) == 3


def names(proxy, api, namespace, count, between=None):
    """Follow ConfigMaps through the proxy while some are made; return the names that came, list by list."""
    told, listed, done = [], threading.Event(), threading.Event()

    def follow():
        def take(found):
            told.append(sorted({one["metadata"]["name"] for one in found} - {"kube-root-ca.crt"}))
            listed.set()
            return "last" in told[-1]

        with closing(Api.of(proxy.kubeconfig(api.token))) as through:
            through.until("configmaps", namespace, take)
            done.set()

    thread = threading.Thread(target=follow)
    thread.start()
    until(listed.is_set)
    until(lambda: proxy.watching)
    for number in range(count):
        api.create(config(f"c{number}"), namespace)
    if between:
        until(lambda: len(told) == count + 1)
        between()
    api.create(config("last"), namespace)
    until(done.is_set)
    thread.join(60)
    return told


def until(true, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_events_are_lost(proxy, api, namespace):
    fault = proxy.drop_events(path="configmaps", after=1)

    told = names(proxy, api, namespace, 3)

    assert fault.struck == 1
    assert told[-1] == ["c0", "c2", "last"]


def test_events_come_twice(proxy, api, namespace):
    proxy.repeat_events(path="configmaps", times=2)

    told = names(proxy, api, namespace, 1)

    assert told == [[], ["c0"], ["c0"], ["c0", "last"]]


def test_watches_are_cut_and_taken_up_again(proxy, api, namespace):
    told = names(proxy, api, namespace, 1, between=proxy.cut_watches)

    assert told[-1] == ["c0", "last"]
    assert sum(one.path.endswith("/configmaps") and not one.watch for one in proxy.requests) == 2
