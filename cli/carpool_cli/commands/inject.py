"""`carpool inject`: adds sidecars to manifests, without a cluster."""

from __future__ import annotations

import copy
import hmac
import json
import re
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import yaml

from carpool.policy.durations import Duration
from carpool.policy.plain import PolicyError, to_plain
from carpool.policy.spec import SLO, BatchingPolicy, Latency
from carpool_cli import options
from carpool_cli.manifest_checks import manifests
from carpool_cli.options import DURATION, INPUT_FILE
from carpool_cli.yaml_edit import edited, in_place, load
from carpool_operator.api import annotations as names
from carpool_operator.api.model import Target
from carpool_operator.injector.bypass import bypasses
from carpool_operator.injector.decide import (
    SIDECAR,
    InjectorSettings,
    annotations_of,
    decide,
    is_secret_name,
    target_of,
)
from carpool_operator.injector.patch import CONFIG, patch, unpatch
from carpool_operator.injector.reasons import NOTES, Note, Reason, Skip
from carpool_operator.workloads import registry
from carpool_operator.workloads.kind import Kind, at
from carpool_sidecar.config.hints import not_utf8
from carpool_sidecar.config.yaml_text import tabs

if TYPE_CHECKING:
    from collections.abc import Iterator

SKIPPED = 3
"""Exit code: a workload that should have a sidecar can't have one."""

_SEPARATOR = re.compile(r"^(?:---|\.\.\.)(?=\s|$)(?P<rest>.*)\n?", re.MULTILINE)
"""Between two documents: the marker, and the rest of its line."""


UNACCOUNTED = (
    "imagePullSecrets are named now, so the API server no longer adds those of the ServiceAccount: name them, too, if "
    "the model's image needs them"
)
"""Note on a pod that names no secrets; the API server adds the service account's only to those."""


class Outcome(NamedTuple):
    """The result for one workload: ``why`` is ``None`` if it has its sidecar now, with the notes on it."""

    name: str
    why: Skip | None
    notes: tuple[Note, ...] = ()
    problems: tuple[str, ...] = ()
    """Annotations that are ignored, or invalid."""
    namespace: str | None = None
    pod: dict[str, Any] | None = None
    """The printed pod, if it has a sidecar."""
    workload: dict[str, Any] | None = None
    """Its manifest in the input."""
    stays: bool = False
    """Whether it already has a sidecar with other settings than requested."""
    elsewhere: bool = False
    """Whether only the webhook can add its sidecars, and nothing asks for that."""

    @property
    def lacking(self) -> bool:
        """Whether it should have this sidecar, and does not."""
        return self.stays or self.elsewhere or (self.why is not None and self.why.is_annotated)


class Asked(NamedTuple):
    """The request from the options; without settings, sidecars are removed. ``secret``: drain keys are derived from it.

    ``image``: ``None`` for any.
    """

    settings: InjectorSettings | None
    namespace: str | None
    secret: bytes
    image: str | None


class Found(NamedTuple):
    """The input's content."""

    outcomes: list[Outcome]
    services: list[dict[str, Any]]
    others: list[dict[str, Any]]
    """NetworkPolicies and HorizontalPodAutoscalers."""


class Wrong(click.ClickException):
    """The input can't be read; the message names the place."""

    exit_code = 2


class NotManifests(Exception):  # noqa: N818 - what the input is
    """The input is not YAML, or not manifests; one line with the place."""


MANIFESTS = "give Kubernetes manifests, YAML or JSON"

JOBS = {"Job": ("spec", "template"), "CronJob": ("spec", "jobTemplate", "spec", "template")}
"""Kinds that no operator tunes, with the path of their pod template: their pods may have sidecars by command."""


@click.command(
    epilog="""\b
Examples:
  carpool inject -f model.yaml --slo-p99 50ms | kubectl apply -f -
  kubectl get deployment resnet -o yaml | carpool inject -f - --public-key key.txt | kubectl apply -f -
  kubectl -n carpool-system get configmap carpool-public-key -o 'jsonpath={.data.publicKey}' > key.txt
  carpool inject -f with-sidecar.yaml --undo | kubectl apply -f -
"""
)
@options.manifests()
@click.option("--slo-p99", type=DURATION, help="Sidecars that tune themselves to this SLO, without any operator.")
@click.option(
    "--public-key",
    metavar="HEX|FILE",
    help="Sidecars that pass all requests through until they get a policy signed with the operator's key.",
)
@click.option("-n", "--namespace", help="Namespace of manifests without one; needed with --public-key.")
@click.option("--image", help="The sidecar's.  [default: carpool-sidecar:VERSION]")
@click.option(
    "--image-pull-secret",
    "pull_secrets",
    multiple=True,
    metavar="NAME",
    help="Secret in the workloads' namespace to pull it with, beside the pods' own.",
)
@click.option(
    "--drain-secret",
    type=INPUT_FILE,
    help="File with a secret that drain keys are derived from.  [default: from the manifest alone]",
)
@click.option("--undo", is_flag=True, help="Take the sidecars out again: manifests as they were before.")
def command(
    *,
    source: str,
    slo_p99: float | None,
    public_key: str | None,
    namespace: str | None,
    image: str | None,
    pull_secrets: tuple[str, ...] = (),
    drain_secret: Path | None = None,
    undo: bool = False,
) -> None:
    """Put a sidecar into workloads and Pods as the webhook does, and print the manifests.

    Unchanged parts are printed as they were, comments included. A workload with a sidecar, or with
    carpool.dev/inject: "false" in its pod template, is left alone. The annotations of the
    template (carpool.dev/container, carpool.dev/port, ...) count. The same input gives the same output.

    Without --public-key a sidecar could not verify an operator's changes, so it accepts none: give --slo-p99 then,
    and each sidecar tunes itself.

    Exits 0 when all have their sidecars, 3 when some can't or have one with other settings, 2 for wrong input. The
    standard error has the reasons, and notes: on Services in the input that bypass the sidecar, and NetworkPolicies
    and HorizontalPodAutoscalers in it that the sidecar breaks.
    """
    if undo and any(given not in {None, ()} for given in (slo_p99, public_key, image, pull_secrets, drain_secret)):
        raise click.UsageError("--undo takes no other option but -f")
    if not undo and (slo_p99 is None) == (public_key is None):
        raise click.UsageError(
            "name --slo-p99 50ms (sidecars that tune themselves) or --public-key (an operator tunes them), one of them"
        )
    if wrong := [name for name in pull_secrets if not is_secret_name(name)]:
        raise click.UsageError(f"--image-pull-secret: {wrong[0]!r} is no name of a Secret")
    settings = None
    if not undo:
        settings = InjectorSettings(
            image=image or f"carpool-sidecar:{version('carpool-serving')}",
            version=version("carpool-serving"),
            pull_secrets=pull_secrets,
            public_key=None if public_key is None else _key(public_key),
            policy=None if slo_p99 is None else _policy(slo_p99),
        )
    text, line_end = _read(source)
    found = Found([], [], [])
    try:
        printed = "".join(_documents(text, Asked(settings, namespace, _secret(drain_secret), image), found))
    except NotManifests as error:
        raise Wrong(f"{'standard input' if source == '-' else source}: {error}: {MANIFESTS}") from None
    click.echo(printed.replace("\n", line_end), nl=False)
    for line in _notes(found):
        click.echo(line, err=True)
    if any(outcome.lacking for outcome in found.outcomes):
        sys.exit(SKIPPED)


def _notes(found: Found) -> Iterator[str]:
    """Return the notes on the result."""
    for outcome in found.outcomes:
        if outcome.why is not None:
            yield f"{outcome.name}: {outcome.why}"
        yield from (f"{outcome.name}: {problem}" for problem in outcome.problems)
        yield from (f"{outcome.name}: {note}: {NOTES[note].cause} {NOTES[note].fix}" for note in outcome.notes)
    for service in found.services:
        with suppress(KeyError, TypeError, AttributeError):  # kubectl reports what is wrong with it
            yield from _bypassed(service, found.outcomes)
    for outcome in found.outcomes:
        with suppress(KeyError, TypeError, AttributeError, ValueError):
            yield from _broken(outcome, found.others)
    if not found.outcomes:
        yield "nothing here has pods: there is no workload with a pod template, and no Pod"


def _bypassed(service: dict[str, Any], outcomes: list[Outcome]) -> Iterator[str]:
    """Return the fix for a Service that bypasses a sidecar."""
    namespace, name = service["metadata"].get("namespace"), service["metadata"]["name"]
    for outcome in outcomes:
        if outcome.pod is None or (namespace or outcome.namespace) != (outcome.namespace or namespace):
            continue
        for way in bypasses(service, outcome.pod):
            first = "" if way.named else f"name the model's port {way.name} in {outcome.name}, and "
            yield (
                f"service/{name}: ServiceBypassed: port {way.port} leads to {outcome.name} by {way.by} and bypasses "
                f"the sidecar: nothing is batched. Correct it: {first}write targetPort: {way.name} in the Service"
            )


def _broken(outcome: Outcome, others: list[dict[str, Any]]) -> Iterator[str]:
    """Return the findings about objects in the input that a sidecar breaks."""
    of = registry.BY_NAME.get(str((outcome.workload or {}).get("kind")))
    if of is None or outcome.workload is None or outcome.pod is None:
        return
    for finding in manifests.findings(of, outcome.workload, outcome.pod, outcome.namespace, others):
        yield (
            f"{outcome.name}: {finding.code}: {finding.message}. Correct it in the manifest; in a cluster this does: "
            f"{finding.fix}"
        )


def _read(source: str) -> tuple[str, str]:
    """Return a text with line feeds alone, and what ends its lines."""
    try:
        content = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
        text = content.decode("utf-8")
    except OSError as error:
        raise Wrong(f"{source}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise Wrong(f"{source}: {not_utf8(error)}") from None
    return text.replace("\r\n", "\n"), "\r\n" if "\r\n" in text else "\n"


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


def _secret(path: Path | None) -> bytes:
    """Return what drain keys are derived from beside the manifest: nothing without a file."""
    try:
        secret = b"" if path is None else path.read_bytes()
    except OSError as error:
        raise Wrong(f"{path}: {error.strerror}") from None
    if path is not None and not secret.strip():
        raise Wrong(
            f"--drain-secret {path}: the file is empty, so that anyone with the manifest has the drain key: write a "
            f"secret to it, e.g. openssl rand -hex 32 > {path}"
        )
    return secret


def _policy(p99: float) -> BatchingPolicy:
    try:
        return BatchingPolicy(slo=SLO(latency=Latency(p99=Duration(p99)))).validate()
    except PolicyError as error:
        raise click.UsageError(f"--slo-p99: {error}") from None


def _documents(text: str, asked: Asked, found: Found) -> Iterator[str]:
    """Yield the input again, piece by piece, with changes where a sidecar was added or, without settings, removed."""
    if not text.strip():
        raise NotManifests("it is empty")
    if text.lstrip().startswith("{"):
        try:
            old = json.loads(text)
        except (ValueError, RecursionError):
            pass  # YAML has braces, too
        else:
            if "kind" not in old:
                raise NotManifests("the document in line 1 is not a manifest, which is a mapping with a kind")
            new = _injected(old, asked, found)
            yield text if new == old else json.dumps(new, indent=4, ensure_ascii=False) + "\n"
            return
    position = 0
    for separator in (*_SEPARATOR.finditer(text), None):
        document = text[position : len(text) if separator is None else separator.start()]
        line = text.count("\n", 0, position) + 1
        rest = "" if separator is None else separator["rest"].strip()
        if separator is not None and rest and not rest.startswith("#"):
            # kubectl counts it to the document before, and reads only the first of these.
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
        new = _injected(old, asked, found)
        yield document if new == old else _changed(document, new, found.outcomes)
        if separator is not None:
            yield separator[0]
            position = separator.end()


def _changed(document: str, new: Any, outcomes: list[Outcome]) -> str:  # noqa: ANN401 - any YAML
    """Return the document with ``new`` in it; if its comments are lost, print a warning."""
    changed = in_place(document, new)
    if changed is not None:
        return changed
    lost = "written anew, without its comments: anchors, merge keys or its layout let no part be changed by itself"
    outcomes[-1] = outcomes[-1]._replace(problems=(*outcomes[-1].problems, lost))
    return edited(document, new)


def _are_directives(text: str, behind: str) -> bool:
    """Whether a text is not a document but precedes one: lines such as %YAML 1.2, followed by their marker."""
    lines = [line for line in text.removeprefix("\ufeff").splitlines() if line.strip() and not line.startswith("#")]
    return bool(lines) and all(line.startswith("%") for line in lines) and behind.startswith("---")


def _problem(error: Exception) -> str:
    """Return the problem of a YAML document."""
    if isinstance(error, yaml.reader.ReaderError):
        return "it has characters that are not text"
    problem: str | None = getattr(error, "problem", None)
    return f"{problem}{tabs(problem)}" if problem else "it is nested too deeply"


def _injected(thing: Any, asked: Asked, found: Found) -> Any:  # noqa: ANN401 - any YAML
    """Return an object with its sidecar, or without settings without it; a list's items all at once."""
    kind = str(thing.get("kind")) if isinstance(thing, dict) else ""
    if kind == "List" and isinstance(thing.get("items"), list):
        return {**thing, "items": [_injected(each, asked, found) for each in thing["items"]]}
    if kind == "Service":
        found.services.append(thing)
    if kind and manifests.is_looked_at(thing):
        found.others.append(thing)
    of = registry.BY_NAME.get(kind)
    job = JOBS.get(kind)
    if of is not None and asked.settings is not None and _is_made_elsewhere(of, thing):
        found.outcomes.append(_elsewhere(of, thing))
        return thing
    if kind != "Pod" and job is None and (of is None or (of.pod(thing) is None and not of.built_in)):
        return thing  # it has no pods, or another object has their template
    changed, settings = copy.deepcopy(thing), asked.settings
    try:
        name = f"{kind.lower()}/{changed['metadata'].get('name') or changed['metadata'].get('generateName')}"
        pod: Any = at(changed, job) if job is not None else changed if of is None else of.pod(changed)
        if settings is None:
            restored = _restored(pod, name, found.outcomes)
            return thing if restored is None else _with(changed, job or of, restored)
        _check_texts(name, changed, pod)
        where: str | None = changed["metadata"].get("namespace") or asked.namespace
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
            outcome = Outcome(name, decision, (), problems, where, workload=thing)
            found.outcomes.append(_left_alone(outcome, pod, settings, target, asked.image))
            return thing
        pod_changed = patch(pod, decision, settings, _drain_key(asked.secret, where, name, pod))
    except (KeyError, TypeError, AttributeError, ValueError, IndexError):
        raise Wrong(
            f"a {kind} is not a valid Kubernetes object: check it with kubectl apply --dry-run=server"
        ) from None
    notes = json.loads(pod_changed["metadata"]["annotations"][names.STATUS])["notes"]
    if settings.pull_secrets and not pod["spec"].get("imagePullSecrets"):
        problems = (*problems, UNACCOUNTED)
    told = tuple(Note(note) for note in notes)
    found.outcomes.append(Outcome(name, None, told, problems, where, pod_changed, thing))
    return _with(changed, job or of, pod_changed)


def _check_texts(name: str, *things: Any) -> None:  # noqa: ANN401 - any YAML
    """Raise ``Wrong`` if one of our annotations is no text: YAML takes 8000 for a number, and Kubernetes refuses it."""
    for thing in things:
        for key, value in ((thing.get("metadata") or {}).get("annotations") or {}).items():
            if str(key).startswith(names.PREFIX) and not isinstance(value, str):
                text = str(value).lower() if isinstance(value, bool) else value
                raise Wrong(f'{name}: {key} is {text}, which is no text: write "{text}", in quotes')


def _is_made_elsewhere(of: Kind, thing: dict[str, Any]) -> bool:
    """Whether a kind's controller makes the pod template, as KServe does, so that only the webhook adds sidecars."""
    path = of.template(thing)
    return not of.templates or (path is not None and path[-2] != "metadata")


def _elsewhere(of: Kind, thing: dict[str, Any]) -> Outcome:
    """Return the result for such a workload."""
    metadata = thing.get("metadata") or {}
    name = f"{of.name.lower()}/{metadata.get('name') or metadata.get('generateName')}"
    if not of.annotating:
        how = (
            f'write {names.INJECT}: "{names.ASKED}" in the templates of the pods that serve: the webhook does the rest'
        )
    else:
        how = f"annotate it, e.g. {names.SLO_PREFIX}p99: 50ms: the webhook does the rest"
    if of.annotating and names.asks_validly(annotations_of(thing)):
        return Outcome(name, None, problems=("the webhook adds its sidecars",))
    return Outcome(name, None, problems=(f"this command can't add its sidecars: {how}",), elsewhere=True)


def _drain_key(secret: bytes, namespace: str | None, name: str, pod: dict[str, Any]) -> str:
    """Return the key of a pod template: stable, so that a repeated pipeline run rolls no pods."""
    text = json.dumps([namespace, name, pod], sort_keys=True, default=str)
    return hmac.new(secret, text.encode("utf-8", "surrogatepass"), "sha256").hexdigest()[:32]


def _left_alone(
    outcome: Outcome, pod: dict[str, Any], settings: InjectorSettings, target: Target | None, image: str | None
) -> Outcome:
    """Return the result for a workload without a new sidecar, with a note if its sidecar differs from the request."""
    if outcome.why is None or outcome.why.reason is not Reason.ALREADY_INJECTED:
        return outcome
    outcome = outcome._replace(pod=pod)
    if names.STATUS not in annotations_of(pod):
        return outcome  # written by a user
    wanted = (
        {"publicKey": settings.public_key, "target": str(target)}
        if settings.policy is None
        else {"policy": to_plain(settings.policy)}
    )
    containers = pod["spec"].get("initContainers") or []
    sidecar: dict[str, Any] = next((each for each in containers if each["name"] == SIDECAR), {})
    texts = (each["value"].replace("$$", "$") for each in sidecar.get("env") or [] if each["name"] == CONFIG)
    given = json.loads(next(texts, "{}"))
    named = pod["spec"].get("imagePullSecrets") or []
    if (
        all(given.get(key) == value for key, value in wanted.items())
        and (image is None or sidecar.get("image") == image)
        and all({"name": name} in named for name in settings.pull_secrets)
    ):
        return outcome
    why = Skip(
        Reason.ALREADY_INJECTED,
        "its sidecar has other settings, and stays as it is: take it out with carpool inject --undo first",
    )
    return outcome._replace(why=why, stays=True)


def _of_workload(of: Kind, thing: dict[str, Any], settings: InjectorSettings) -> tuple[str, ...]:
    """Return the problems of a workload's annotations, and those that a self-tuning sidecar ignores."""
    found = annotations_of(thing)
    problems = names.read(of.name, str(thing["metadata"].get("name")), found).problems
    unread = [f"{key} is for an operator: here --slo-p99 counts" for key in found if key.startswith(names.SLO_PREFIX)]
    return (*problems, *(unread if settings.policy is not None else []))


def _with(thing: dict[str, Any], of: Kind | tuple[str, ...] | None, pod: dict[str, Any]) -> dict[str, Any]:
    """Return an object with another pod template at the place that ``of`` gives; a pod is its own."""
    if of is None:
        return pod
    # Insert it at the old place: YAML anchors may share parts with other objects.
    *outer, last = of if isinstance(of, tuple) else (of.template(thing) or ())[:-2]
    at(thing, outer)[last] = pod
    return thing


def _restored(pod: dict[str, Any], name: str, outcomes: list[Outcome]) -> dict[str, Any] | None:
    """Return a pod template as it was before its sidecar; ``None`` if it has none."""
    try:
        restored = unpatch(pod)
    except ValueError as error:
        raise Wrong(
            f"{name}: its sidecar can't be taken out: {error}; take the container carpool out by hand"
        ) from None
    why = Skip(Reason.NOT_OPTED_IN, "no sidecar by carpool inject is in it") if restored is None else None
    outcomes.append(Outcome(name, why))
    return restored
