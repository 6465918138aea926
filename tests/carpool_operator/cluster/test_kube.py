from __future__ import annotations

import asyncio
import json

import pytest

from carpool_operator.cluster.kube import APPLY, ApiError, ConfigException, connect, path_of

MAP = "/api/v1/namespaces/ns/configmaps/colours"


def test_paths():
    assert path_of("v1", "pods", None) == "/api/v1/pods"
    assert path_of("apps/v1", "deployments", "ns") == "/apis/apps/v1/namespaces/ns/deployments"
    assert path_of("carpool.dev/v1alpha1", "batchingpolicies", "ns", "p", "status") == (
        "/apis/carpool.dev/v1alpha1/namespaces/ns/batchingpolicies/p/status"
    )


async def test_it_writes_and_reads(kube):
    body = {"metadata": {"name": "colours"}, "data": {"sky": "blue"}}

    await kube.request("PATCH", MAP, body, query={"fieldManager": "me", "force": "true"}, content=APPLY)

    assert json.loads(await kube.request("GET", MAP))["data"] == {"sky": "blue"}


async def test_a_refusal_has_its_status_the_server_s_words_and_how_long_to_wait(api, kube):
    told = []
    kube.failed = lambda method, status: told.append((method, status))
    with pytest.raises(ApiError, match="'colours' not found") as missing:
        await kube.request("GET", MAP)
    api.fail("GET", 429, retry_after="7")
    with pytest.raises(ApiError) as busy:
        await kube.request("GET", MAP)

    assert missing.value.status == 404
    assert (busy.value.status, busy.value.retry_after) == (429, 7.0)
    assert told == [("GET", 404), ("GET", 429)]


async def test_no_answer_is_status_0(api, kube):
    api.fail("GET", drop=True)
    with pytest.raises(ApiError) as broken:
        await kube.request("GET", MAP)

    assert broken.value.status == 0
    with pytest.raises(ApiError) as missing:
        await kube.request("GET", MAP)
    assert missing.value.status == 404  # it goes on


async def test_a_slow_answer_is_not_waited_for_beyond_its_time(api, kube):
    stall = asyncio.Event()
    api.fail("GET", stall=stall)

    with pytest.raises(ApiError) as late:
        await kube.request("GET", MAP, within=0.05)

    assert late.value.status == 0
    stall.set()


async def test_what_comes_before_a_request_may_keep_it_from_going_out(api, kube):
    def refuse():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await kube.request("GET", MAP, before=refuse)

    assert api.log == []


async def test_threads_do_not_run_out_when_answers_fail(api, kube):
    """Twenty failures, four threads and eight connections: the next request still goes through."""
    api.fail("GET", 500, times=20)
    failures = await asyncio.gather(*(kube.request("GET", MAP) for _ in range(20)), return_exceptions=True)

    assert {each.status for each in failures} == {500}
    with pytest.raises(ApiError, match="not found"):
        await kube.request("GET", MAP)


def test_without_a_cluster_it_says_so(tmp_path, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    with pytest.raises(ConfigException):
        connect(str(tmp_path / "nothing"))


def test_a_kubeconfig_is_used_where_one_is_named(tmp_path):
    file = tmp_path / "config"
    file.write_text(
        json.dumps(
            {
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
                "clusters": [{"name": "k", "cluster": {"server": "https://10.244.0.1:6443"}}],
                "users": [{"name": "u", "user": {"token": "secret"}}],
            }
        )
    )

    kube = connect(str(file))

    assert kube.configuration.host == "https://10.244.0.1:6443"
    kube.close()
