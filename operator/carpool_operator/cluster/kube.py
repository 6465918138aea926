"""The API server: address, credentials and TLS from the official client; bytes in, bytes out, in threads.

The client's own models are not used: decoding 5,000 pods into them takes a minute and hundreds of MiB.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import kubernetes.client
import kubernetes.config
import msgspec
import urllib3

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

TIMEOUT = 10.0
"""Timeout of a request in seconds, also for a list's page."""

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
JSON = "application/json"

FIELD_MANAGER = "carpool-operator"


class ApiError(Exception):
    """The API server rejected the request, or did not answer: ``status`` is 0 then."""

    def __init__(self, status: int, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        """Seconds to wait, from the server; 0 where it names none."""


class _Status(msgspec.Struct):
    message: str = ""


def path_of(api: str, plural: str, namespace: str | None, name: str = "", sub: str = "") -> str:
    """Return the path of objects. ``api``: ``v1`` or ``apps/v1``; without a namespace: in all of them."""
    parts = ["/apis" if "/" in api else "/api", api]
    if namespace is not None:
        parts += ["namespaces", namespace]
    return "/".join([*parts, plural, *filter(None, (name, sub))])


class Kube:
    """One connection pool, and the threads that wait for answers."""

    def __init__(self, configuration: Any, *, workers: int = 8) -> None:  # noqa: ANN401 - the client has no types
        # No retries: the next pass knows better whether a failed request is still needed.
        configuration.retries = False
        configuration.connection_pool_maxsize = workers + 4
        self.configuration = configuration
        self.workers = workers
        """Requests that may run at a time; further ones wait."""
        self.failed: Callable[[str, int], None] = lambda _method, _status: None
        """Called after every failed request with its method, and the status or 0."""
        self._client = kubernetes.client.ApiClient(configuration)
        self._client.user_agent = FIELD_MANAGER
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="api")

    async def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        query: Mapping[str, str | int] | None = None,
        content: str = JSON,
        within: float = TIMEOUT,
        before: Callable[[], None] | None = None,
    ) -> bytes:
        """Send the request in a thread, and return the answer's body; times out after ``within`` seconds.

        ``before`` is called in that thread just before the request is sent, and may raise.

        Raises ``ApiError``.
        """
        sent = None if body is None else msgspec.json.encode(body)

        def call() -> bytes:
            if before is not None:
                before()
            with self._answer(method, path, query, sent, content, urllib3.Timeout(total=within)) as response:
                data: bytes = response.data
                return data

        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def get(self, path: str, query: Mapping[str, str | int] | None = None) -> bytes:
        """Send the request in the calling thread.

        Raises ``ApiError``.
        """
        with self._answer("GET", path, query, None, JSON, urllib3.Timeout(total=TIMEOUT)) as response:
            data: bytes = response.data
            return data

    def lines(self, path: str, query: Mapping[str, str | int], silence: float) -> Iterator[bytes]:
        """Yield the lines of an endless answer in the calling thread, until its end or ``silence`` seconds without any.

        Raises ``ApiError``.
        """
        with self._answer("GET", path, query, None, JSON, urllib3.Timeout(connect=TIMEOUT, read=silence)) as response:
            rest = b""
            for chunk in response.stream(65536, decode_content=True):
                *whole, rest = (rest + chunk).split(b"\n")
                yield from whole

    def close(self) -> None:
        """Release threads and connections; pending answers are abandoned."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()  # type: ignore[no-untyped-call] # the client has no types

    @contextmanager
    def _answer(
        self,
        method: str,
        path: str,
        query: Mapping[str, str | int] | None,
        body: bytes | None,
        content: str,
        timeout: urllib3.Timeout,
    ) -> Iterator[Any]:
        """Send, and convert any failure, also while reading the answer, into an ``ApiError``."""
        headers = {"Accept": JSON}
        if body is not None:
            headers["Content-Type"] = content
        try:
            _, url, headers, *_ = self._client.param_serialize(
                method,
                path,
                query_params=list((query or {}).items()),
                header_params=headers,
                auth_settings=["BearerToken"],
            )
            # As bytes: the client would apply `json.dumps` again for application/json.
            response = self._client.rest_client.pool_manager.request(
                method,
                url,
                body=body,
                headers=headers,
                timeout=timeout,
                preload_content=False,
            )
            try:
                _check(response)
                yield response
                response.release_conn()
            except BaseException:
                response.close()
                raise
        except ApiError as error:
            self.failed(method, error.status)
            raise
        except (urllib3.exceptions.HTTPError, OSError) as error:
            self.failed(method, 0)
            raise ApiError(0, f"{type(error).__name__}: {error}") from None


def _check(response: Any) -> None:  # noqa: ANN401 - the client has no types
    if not 200 <= response.status < 300:
        raise ApiError(response.status, _message(response.data), _seconds(response.headers.get("Retry-After", "")))


def _message(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_Status).message
    except msgspec.DecodeError:
        return body[:200].decode(errors="replace")


def _seconds(header: str) -> float:
    return float(header) if header.isdecimal() else 0.0


def connect(kubeconfig: str | None, *, workers: int = 8) -> Kube:
    """Return a connection: from a kubeconfig named here or in KUBECONFIG, else from inside the cluster.

    Raises ``ConfigException`` if there is neither.
    """
    configuration = kubernetes.client.Configuration()
    if kubeconfig or "KUBECONFIG" in os.environ or "KUBERNETES_SERVICE_HOST" not in os.environ:
        kubernetes.config.load_kube_config(kubeconfig, client_configuration=configuration, persist_config=False)  # type: ignore[no-untyped-call] # likewise
    else:
        kubernetes.config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call] # likewise
    return Kube(configuration, workers=workers)


ConfigException = kubernetes.config.ConfigException
