"""Accesses the cluster through ``kubectl``; each failure becomes one line with the fix."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click
import msgspec
from msgspec import Struct

from carpool_cli.answers import UNREADABLE
from carpool_operator.api.annotations import PREFIX
from carpool_operator.api.spec import GROUP, PLURAL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

T = TypeVar("T")

RESOURCE = f"{PLURAL}.{GROUP}"
"""The full name: another resource may have the same short one."""

PAUSED = PREFIX + "paused"
"""Annotation of a policy whose parameters must not change."""

PATIENCE = "20s"
"""Timeout of one request to the API server."""


class NotFoundError(click.ClickException):
    """The object does not exist."""


class NoKindError(click.ClickException):
    """The cluster has no such kind of object."""


class ForbiddenError(click.ClickException):
    """Access is denied; ``line`` is the server's message, without the fix."""

    def __init__(self, line: str) -> None:
        self.line = line
        super().__init__("\n".join([line, *_rights(line)]))


class AwayError(click.ClickException):
    """An aggregated API is not available; ``printed`` is kubectl's output about all others."""

    def __init__(self, line: str, printed: str) -> None:
        self.printed = printed
        super().__init__(line)


def _rights(line: str) -> Iterator[str]:
    """Yield the rights to ask for; nothing if no right is missing, but room in a quota."""
    asked = re.search(r'cannot (\w+) resource "([^"]+)"', line)
    if RESOURCE in line:
        yield (
            "ask for the role `view` of the namespace to read policies, or `edit` to pause and resume them "
            "(the chart adds policies to both)"
        )
    elif asked is not None:
        everywhere = "at the cluster scope" in line
        where = "in the whole cluster: a ClusterRole and its ClusterRoleBinding" if everywhere else "there"
        yield f"ask for the right to {asked[1]} {asked[2]} {where}"


class Cluster(NamedTuple):
    """The cluster and namespace; ``None`` is kubectl's default."""

    namespace: str | None = None
    context: str | None = None
    kubeconfig: str | None = None

    def within(self, outer: Cluster) -> Cluster:
        """Return it, completed with values of ``outer``."""
        return Cluster(*(mine if mine is not None else theirs for mine, theirs in zip(self, outer, strict=True)))

    def flags(self) -> str:
        """Return the flags with which a command reaches the same cluster."""
        return "".join(f" {flag} {value}" for flag, value in zip(_FLAGS, self, strict=True) if value is not None)

    def run(self, *arguments: str, text: str = "") -> str:
        """Run kubectl and return its output; ``text`` is its input.

        Raises ``click.ClickException`` with the fix; ``NotFoundError`` if the object does not exist.
        """
        program = shutil.which("kubectl")
        if program is None:
            raise click.ClickException("there is no kubectl on the PATH: install it, this command works through it")
        options = [f"{flag}={value}" for flag, value in zip(_FLAGS, self, strict=True) if value is not None]
        done = subprocess.run(  # noqa: S603 - a person's own kubectl, and no shell
            [program, *arguments, *options, f"--request-timeout={PATIENCE}"],
            input=text.encode(), capture_output=True, check=False,
        )  # fmt: skip
        try:
            printed = done.stdout.decode()
        except UnicodeDecodeError as error:
            raise click.ClickException(f"what kubectl prints is not UTF-8 from byte {error.start + 1} on") from None
        if done.returncode == 0:
            return printed
        said = done.stderr.decode("utf-8", "replace").strip()
        raise _failure(said or f"kubectl ended with {done.returncode}", printed)

    def names(self) -> list[str]:
        """Return the names of the policies in the namespace.

        Raises ``click.ClickException``.
        """
        # batchingpolicy.carpool.dev/resnet
        return [line.rpartition("/")[2] for line in self.run("get", RESOURCE, "--output=name").splitlines()]

    def get(self, name: str) -> dict[str, Any]:
        """Return a policy as the server writes it.

        Raises ``click.ClickException`` with similar names if there is none.
        """
        try:
            return read_object(self.run("get", RESOURCE, name, "--output=json"))
        except NotFoundError:
            raise NotFoundError(self._missing(name, self.names())) from None

    def items(self, resource: str, *arguments: str, everywhere: bool = False) -> list[dict[str, Any]]:
        """Return the objects of a kind, of the namespace or of all namespaces.

        Raises ``click.ClickException``.
        """
        where = ["--all-namespaces"] if everywhere else []
        printed = self.run("get", resource, *arguments, *where, "--output=json")
        return read_list(printed)

    def list(self, *, everywhere: bool = False) -> list[dict[str, Any]]:
        """Return the policies of the namespace, or of all namespaces.

        Raises ``click.ClickException``.
        """
        return self.items(RESOURCE, everywhere=everywhere)

    def _missing(self, name: str, names: Sequence[str]) -> str:
        where = "this namespace" if self.namespace is None else f"namespace {self.namespace}"
        near = get_close_matches(name, names, 3, 0.5)
        if near:
            return f"no BatchingPolicy {name} in {where}; did you mean {' or '.join(near)}?"
        if names:
            return f"no BatchingPolicy {name} in {where}, which has {', '.join(names[:10])}"
        return f"no BatchingPolicy {name} in {where}, nor any other: name its namespace with -n"


def alive(pods: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield pods that run or will run: not those that ended or are being deleted."""
    for pod in pods:
        ended = (pod.get("status") or {}).get("phase") in {"Succeeded", "Failed"}
        if not pod["metadata"].get("deletionTimestamp") and not ended:
            yield pod


_FLAGS = ("--namespace", "--context", "--kubeconfig")


def read_object(text: str) -> dict[str, Any]:
    """Parse kubectl's JSON output.

    Raises ``click.ClickException``.
    """
    return _read(text, dict[str, Any])


def read_list(text: str) -> list[dict[str, Any]]:
    """Parse kubectl's JSON output of several objects.

    Raises ``click.ClickException``.
    """
    return _read(text, _List).items


class _List(Struct):
    items: list[dict[str, Any]]


def _read(text: str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except UNREADABLE as error:
        raise click.ClickException(f"what kubectl prints is no object: {error}") from None


def _failure(text: str, printed: str) -> click.ClickException:
    """Convert kubectl's error to a message with the fix. ``printed``: its output in spite of the error."""
    line = text.splitlines()[-1].removeprefix("error: ").removeprefix("Error from server ")
    if re.search(r"doesn't have a resource type|no matches for kind|could not find the requested resource", text):
        return NoKindError(
            f"this cluster has no {RESOURCE}: install Carpool (helm install carpool charts/carpool), or name the "
            "cluster that has it with --context"
        )
    if "(NotFound)" in text:
        return NotFoundError(line)
    if "(Forbidden)" in text or "forbidden:" in text:
        return ForbiddenError(line)
    if re.search(r"retrieve the complete list of server APIs|\(ServiceUnavailable\)", text):
        return AwayError(f"kubectl: {line}", printed)
    if re.search(r"Unauthorized|must be logged in", text):
        return click.ClickException(f"{line}\nlog in to the cluster again, as for kubectl itself")
    if re.search(r"was refused|no such host|i/o timeout|Timeout|deadline exceeded|Unable to connect", text):
        return click.ClickException(f"{line}\nno API server answers: start it, or name another with --context")
    return click.ClickException(f"kubectl: {line}")


def cluster_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add ``-n``, ``--context`` and ``--kubeconfig`` to a command; it reads them with ``here``.

    They may come before the subcommand or after it; the latter take precedence.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, namespace: str | None, context: str | None, kubeconfig: str | None, **rest: Any) -> None:  # noqa: ANN401 - whatever click passes
        ctx = click.get_current_context()
        outer = ctx.parent.obj if ctx.parent is not None and isinstance(ctx.parent.obj, Cluster) else Cluster()
        ctx.obj = Cluster(namespace, context, kubeconfig).within(outer)
        function(*args, **rest)

    for option in (
        click.option("--kubeconfig", metavar="FILE", help="As kubectl takes it."),
        click.option("--context", metavar="NAME", help="As kubectl takes it."),
        click.option("-n", "--namespace", metavar="NAME", help="Namespace.  [default: the context's]"),
    ):
        wrapped = option(wrapped)
    return wrapped


def here() -> Cluster:
    """Return the cluster of the running command."""
    found = click.get_current_context().obj
    assert isinstance(found, Cluster)  # noqa: S101 - every command has the options
    return found
