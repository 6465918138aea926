"""`carpool inject`: sidecars into manifests, without a cluster."""

from __future__ import annotations

import copy
import json
import re
import secrets
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import yaml

from carpool.policy.durations import Duration
from carpool.policy.plain import PolicyError
from carpool.policy.spec import SLO, BatchingPolicy, Latency
from carpool_cli.options import DURATION
from carpool_cli.yaml_edit import edited, in_place, load
from carpool_operator.api import annotations as names
from carpool_operator.api.model import Target
from carpool_operator.injector.decide import Settings, annotations_of, decide, target_of
from carpool_operator.injector.patch import patch, unpatch
from carpool_operator.injector.reasons import NOTES, Note, Reason, Skip
from carpool_operator.workloads import registry
from carpool_operator.workloads.kind import Kind, at

if TYPE_CHECKING:
    from collections.abc import Iterator

SKIPPED = 3
"""Exit code: a workload was to have a sidecar and can't."""

_SEPARATOR = re.compile(r"^(?:---|\.\.\.)(?=\s|$)(?P<rest>.*)\n?", re.MULTILINE)
"""Between two documents: the mark, and what stands behind it on its line."""


class Outcome(NamedTuple):
    """What became of one workload: ``why`` is ``None`` where it has its sidecar now, with what is to be known of it."""

    name: str
    why: Skip | None
    notes: tuple[Note, ...] = ()
    problems: tuple[str, ...] = ()
    """Annotations that nobody reads, or that can't be meant."""


class Wrong(click.ClickException):
    """The input can't be read; what it says names the place."""

    exit_code = 2


class NotManifests(Exception):  # noqa: N818 - what the input is
    """The input is no YAML, or YAML of something else; one line with the place."""


MANIFESTS = "give Kubernetes manifests, YAML or JSON"

JOBS = {"Job": ("spec", "template"), "CronJob": ("spec", "jobTemplate", "spec", "template")}
"""Kinds that no operator tunes, with where their pods' template lies: their pods may have sidecars by hand."""


@click.command(
    epilog="""\b
Examples:
  carpool inject -f model.yaml --slo-p99 50ms | kubectl apply -f -
  kubectl get deployment resnet -o yaml | carpool inject -f - --public-key key.txt | kubectl apply -f -
  kubectl -n carpool-system get configmap carpool-public-key -o 'jsonpath={.data.publicKey}' > key.txt
  carpool inject -f with-sidecar.yaml --undo | kubectl apply -f -
"""
)
@click.option(
    "-f",
    "--filename",
    "source",
    required=True,
    metavar="FILE",
    help="Manifests, YAML or JSON, any number of documents; - is the standard input.",
)
@click.option("--slo-p99", type=DURATION, help="Sidecars that tune themselves to this SLO, without any operator.")
@click.option(
    "--public-key",
    metavar="HEX|FILE",
    help="Sidecars that pass all requests through until they get a policy signed with the operator's key.",
)
@click.option("-n", "--namespace", help="Namespace of manifests without one; needed with --public-key.")
@click.option("--image", help="The sidecar's.  [default: carpool-sidecar:VERSION]")
@click.option("--undo", is_flag=True, help="Take the sidecars out again: manifests as they were before.")
def command(
    *,
    source: str,
    slo_p99: float | None,
    public_key: str | None,
    namespace: str | None,
    image: str | None,
    undo: bool = False,
) -> None:
    """Put a sidecar into workloads and Pods as the webhook does, and print the manifests.

    Unchanged parts are printed as they were, comments included. A workload with a sidecar, or with
    carpool.dev/inject: "false" in its pod template, is left alone. The annotations of the
    template (carpool.dev/container, -/port, ...) count.

    Without --public-key a sidecar could not verify an operator's changes, so it accepts none: give --slo-p99 then,
    and each sidecar tunes itself.

    Exits 0 when all have their sidecars, 3 when some can't, 2 for wrong input. The standard error has the reasons, and
    notes on workloads that have theirs, such as a port without a name: Services bypass the sidecar then.
    """
    if undo and (slo_p99, public_key, image) != (None, None, None):
        raise click.UsageError("--undo takes no other option but -f")
    if not undo and (slo_p99 is None) == (public_key is None):
        raise click.UsageError(
            "name --slo-p99 50ms (sidecars that tune themselves) or --public-key (an operator tunes them), one of them"
        )
    settings = None
    if not undo:
        settings = Settings(
            image=image or f"carpool-sidecar:{version('carpool-serving')}",
            version=version("carpool-serving"),
            public_key=None if public_key is None else _key(public_key),
            policy=None if slo_p99 is None else _policy(slo_p99),
        )
    text = _read(source)
    outcomes: list[Outcome] = []
    try:
        printed = "".join(_documents(text, settings, namespace, outcomes))
    except NotManifests as error:
        raise Wrong(f"{'standard input' if source == '-' else source}: {error}: {MANIFESTS}") from None
    click.echo(printed, nl=False)
    for outcome in outcomes:
        if outcome.why is not None:
            click.echo(f"{outcome.name}: {outcome.why}", err=True)
        for problem in outcome.problems:
            click.echo(f"{outcome.name}: {problem}", err=True)
        for note in outcome.notes:
            click.echo(f"{outcome.name}: {note}: {NOTES[note].cause} {NOTES[note].fix}", err=True)
    if not outcomes:
        click.echo("nothing here has pods: there is no workload with a pod template, and no Pod", err=True)
    if any(outcome.why is not None and outcome.why.told for outcome in outcomes):
        sys.exit(SKIPPED)


def _read(source: str) -> str:
    try:
        return sys.stdin.read() if source == "-" else Path(source).read_text("utf-8")
    except OSError as error:
        raise Wrong(f"{source}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise Wrong(f"{source}: not UTF-8") from None


def _key(given: str) -> str:
    keys = r"[0-9a-fA-F]{64}(,[0-9a-fA-F]{64})*"
    if re.fullmatch(keys, given):
        return given.lower()
    try:
        text = Path(given).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        text = ""
    if not re.fullmatch(keys, text):
        raise click.UsageError(f"--public-key: {given!r} is neither 64 hex digits nor a file with them")
    return text.lower()


def _policy(p99: float) -> BatchingPolicy:
    try:
        return BatchingPolicy(slo=SLO(latency=Latency(p99=Duration(p99)))).validate()
    except PolicyError as error:
        raise click.UsageError(f"--slo-p99: {error}") from None


def _documents(text: str, settings: Settings | None, namespace: str | None, outcomes: list[Outcome]) -> Iterator[str]:
    """Yield the input again, piece by piece, changed where a sidecar came in, or went: without settings."""
    if not text.strip():
        raise NotManifests("it is empty")
    if text.lstrip().startswith("{"):
        try:
            old = json.loads(text)
        except ValueError:
            pass  # YAML has braces, too
        else:
            if "kind" not in old:
                raise NotManifests("the document in line 1 is not a manifest, which is a mapping with a kind")
            new = _injected(old, settings, namespace, outcomes)
            yield text if new == old else json.dumps(new, indent=4, ensure_ascii=False) + "\n"
            return
    position = 0
    for separator in (*_SEPARATOR.finditer(text), None):
        document = text[position : len(text) if separator is None else separator.start()]
        line = text.count("\n", 0, position) + 1
        rest = "" if separator is None else separator["rest"].strip()
        if separator is not None and rest and not rest.startswith("#"):
            # To kubectl it belongs to the document before, of which it reads no more than the first.
            at_mark = text.count("\n", 0, separator.start()) + 1
            raise NotManifests(f"line {at_mark} has {separator[0][:3]} and more: put a line break behind it")
        try:
            old = None if separator is not None and _are_directives(document, separator[0]) else load(document)
        except (yaml.YAMLError, RecursionError) as error:
            mark = getattr(error, "problem_mark", None)
            line += 0 if mark is None else mark.line
            raise NotManifests(f"line {line} is not YAML, {_problem(error)}") from None
        if old is not None and not (isinstance(old, dict) and "kind" in old):
            raise NotManifests(f"the document in line {line} is not a manifest, which is a mapping with a kind")
        new = _injected(old, settings, namespace, outcomes)
        yield document if new == old else _changed(document, new, outcomes)
        if separator is not None:
            yield separator[0]
            position = separator.end()


def _changed(document: str, new: Any, outcomes: list[Outcome]) -> str:  # noqa: ANN401 - any YAML
    """Return the document with ``new`` in it; where its comments are lost, it is said."""
    changed = in_place(document, new)
    if changed is not None:
        return changed
    lost = "written anew, without its comments, since it has anchors or merge keys where it changes"
    outcomes[-1] = outcomes[-1]._replace(problems=(*outcomes[-1].problems, lost))
    return edited(document, new)


def _are_directives(text: str, behind: str) -> bool:
    """Whether a text is no document but what precedes one: lines such as %YAML 1.2, with its mark behind them."""
    lines = [line for line in text.removeprefix("\ufeff").splitlines() if line.strip() and not line.startswith("#")]
    return bool(lines) and all(line.startswith("%") for line in lines) and behind.startswith("---")


def _problem(error: Exception) -> str:
    """Return what is the matter with YAML."""
    if isinstance(error, yaml.reader.ReaderError):
        return "it has characters that are not text"
    return getattr(error, "problem", None) or "it is nested too deeply"


def _injected(thing: Any, settings: Settings | None, namespace: str | None, outcomes: list[Outcome]) -> Any:  # noqa: ANN401 - any YAML
    """Return an object with its sidecar, or without it where there are no settings; of a list all of them."""
    kind = str(thing.get("kind")) if isinstance(thing, dict) else ""
    if kind == "List" and isinstance(thing.get("items"), list):
        return {**thing, "items": [_injected(each, settings, namespace, outcomes) for each in thing["items"]]}
    of = registry.BY_NAME.get(kind)
    job = JOBS.get(kind)
    if kind != "Pod" and job is None and (of is None or (of.pod(thing) is None and not of.built_in)):
        return thing  # it has no pods, or another object has the template of its pods
    changed = copy.deepcopy(thing)
    try:
        name = f"{kind.lower()}/{changed['metadata'].get('name') or changed['metadata'].get('generateName')}"
        pod: Any = at(changed, job) if job is not None else changed if of is None else of.pod(changed)
        if settings is None:
            restored = _restored(pod, name, outcomes)
            return thing if restored is None else _with(changed, job or of, restored)
        where: str | None = changed["metadata"].get("namespace") or namespace
        target = None
        if settings.policy is None:
            if job is not None:
                raise Wrong(f"{name}: no operator tunes the pods of a {kind}: use --slo-p99")
            if where is None:
                raise Wrong(f"{name} names no namespace, and the operator's changes need one: add -n NAMESPACE")
            if of is not None and not changed["metadata"].get("name") and changed["metadata"].get("generateName"):
                raise Wrong(
                    f"{name} has a generateName, and the operator's changes are for a workload of one name: write "
                    "metadata.name, or use --slo-p99"
                )
            target = target_of(pod, where) if of is None else Target(where, kind, changed["metadata"]["name"])
        problems = (
            *names.misplaced(annotations_of(pod)),
            *(() if of is None else _of_workload(of, changed, settings)),
        )
        decision = decide(pod, target, settings, asked=True)
        if isinstance(decision, Skip):
            outcomes.append(Outcome(name, decision, problems=problems))
            return thing
        pod_changed = patch(pod, decision, settings, secrets.token_hex(16))
    except (KeyError, TypeError, AttributeError, ValueError, IndexError):
        raise Wrong(
            f"a {kind} is not a valid Kubernetes object: check it with kubectl apply --dry-run=server"
        ) from None
    notes = json.loads(pod_changed["metadata"]["annotations"][names.STATUS])["notes"]
    outcomes.append(Outcome(name, None, tuple(Note(note) for note in notes), problems))
    return _with(changed, job or of, pod_changed)


def _of_workload(of: Kind, thing: dict[str, Any], settings: Settings) -> tuple[str, ...]:
    """Return what is wrong with a workload's annotations, or is not read by a sidecar that tunes itself."""
    found = annotations_of(thing)
    problems = names.read(of.name, str(thing["metadata"].get("name")), found).problems
    unread = [f"{key} is for an operator: here --slo-p99 counts" for key in found if key.startswith(names.SLO_PREFIX)]
    return (*problems, *(unread if settings.policy is not None else []))


def _with(thing: dict[str, Any], of: Kind | tuple[str, ...] | None, pod: dict[str, Any]) -> dict[str, Any]:
    """Return an object with another pod template, which ``of`` says the place of; a pod is its own."""
    if of is None:
        return pod
    # Put where the old one was: what YAML's anchors share is another's as well.
    *outer, last = of if isinstance(of, tuple) else (of.template(thing) or ())[:-2]
    at(thing, outer)[last] = pod
    return thing


def _restored(pod: dict[str, Any], name: str, outcomes: list[Outcome]) -> dict[str, Any] | None:
    """Return a pod template as it was before its sidecar; ``None`` where it has none."""
    try:
        restored = unpatch(pod)
    except ValueError as error:
        raise Wrong(
            f"{name}: its sidecar can't be taken out: {error}; take the container carpool out by hand"
        ) from None
    why = Skip(Reason.NOT_OPTED_IN, "no sidecar by carpool inject is in it") if restored is None else None
    outcomes.append(Outcome(name, why))
    return restored
