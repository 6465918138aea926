"""A kubectl that knows a few policies, keeps what is annotated, and says what it was asked."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime, timedelta

import pytest
from click.testing import CliRunner

from carpool_cli.kubectl.main import main

FAKE = """#!{python} -SE
import json, pathlib, sys
folder = pathlib.Path({folder!r})
state = json.loads((folder / "state.json").read_text())
arguments = sys.argv[1:]
with (folder / "asked").open("a") as log:
    log.write(json.dumps(arguments) + "\\n")
if state["stderr"]:
    print(state["stderr"], file=sys.stderr)
    sys.exit(1)
words = [each for each in arguments if not each.startswith("--")]
if words[0] == "config":
    print("from-the-context")
    sys.exit()
if words[0] == "get" and words[1].startswith(("deployment/", "statefulset/")):
    if words[1] not in state["workloads"]:
        print('Error from server (NotFound): %s not found' % words[1], file=sys.stderr)
        sys.exit(1)
    print(json.dumps({{"metadata": {{"annotations": state["workloads"][words[1]]}}}}))
    sys.exit()
output = next((each.partition("=")[2] for each in arguments if each.startswith("--output=")), "")
items = state[words[1]] if words[1:2] and words[1] in state else state["policies"]
if len(words) > 2 and "/" not in words[1]:
    items = [each for each in items if each["metadata"]["name"] == words[2]]
    if not items:
        print('Error from server (NotFound): batchingpolicies.carpool.dev "%s" not found' % words[2], file=sys.stderr)
        sys.exit(1)
if words[0] == "annotate":
    name, equals, value = words[3].partition("=")
    annotations = items[0]["metadata"].setdefault("annotations", {{}})
    if equals:
        annotations[name] = value
    else:
        annotations.pop(name.rstrip("-"), None)
    (folder / "state.json").write_text(json.dumps(state))
elif output == "name":
    print("".join("batchingpolicy.carpool.dev/%s\\n" % each["metadata"]["name"] for each in items), end="")
elif state["printed"] is not None:
    sys.stdout.buffer.write(state["printed"].encode("utf-8", "surrogateescape") + b"\\n")
else:
    print(json.dumps(items[0] if len(words) > 2 else {{"kind": "List", "items": items}}))
"""


def at(**ago):
    return (datetime.now(UTC) - timedelta(**ago)).strftime("%Y-%m-%dT%H:%M:%SZ")


def parameters(batch, wait="2ms", in_flight=2):
    return {"maxBatch": batch, "maxWait": wait, "maxInFlight": in_flight, "passThrough": False}


def condition(kind, status, reason, message=""):
    return {
        "type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": at(hours=12),
        "observedGeneration": 3,
    }  # fmt: skip


GOOD = [
    condition("Accepted", "True", "Valid"),
    condition("Programmed", "True", "Acknowledged"),
    condition("MetricsAvailable", "True", "Read"),
    condition("SLOMet", "True", "Met"),
    condition("Ready", "True", "Ready"),
]


def policy(name="resnet", conditions=GOOD, *, targets=("resnet",), annotations=None, **status):
    """A policy as the server writes it; without a status where `conditions` is None."""
    written = {
        "observedGeneration": 3,
        "conditions": conditions,
        "applied": {
            "generation": 1795000000000, "at": at(minutes=4), "target": "Deployment/resnet", "model": "*",
            "parameters": parameters(8), "batch": "8", "wait": "2ms",
        },
        "recommendation": {
            "target": "Deployment/resnet", "model": "*", "parameters": parameters(16),
            "uncapped": parameters(64, "20ms"), "cappedBy": "canary",
        },
        "lastDecision": {
            "action": "Applied", "reason": "SavesDeviceTime", "message": "device time falls 20%", "model": "*",
            "target": "Deployment/resnet", "at": at(seconds=40),
            "observed": {"rate": 301.0, "p99": "31ms", "missFraction": 0.0012},
            "predicted": {
                "rate": 300.0, "p99": "30ms", "missFraction": 0.001, "meanBatch": 4.2,
                "deviceTime": "1ms200us",
            },
        },
        "targets": [
            {
                "kind": "Deployment", "name": "resnet", "replicas": 3, "injected": 3, "acknowledged": 3,
                "models": [
                    {
                        "name": "*", "generation": 1795000000000, "parameters": parameters(8),
                        "trial": {
                            "generation": 1795000000001, "parameters": parameters(16), "pods": ["resnet-a"],
                            "since": at(seconds=9),
                        },
                    }
                ],
            }
        ],
        "history": [
            {
                "generation": 1795000000000 - number, "at": at(minutes=4 + number), "target": "Deployment/resnet",
                "model": "*", "parameters": parameters(8 - number), "reason": "SavesDeviceTime",
            }
            for number in range(2)
        ],
        "fieldOfANewerOperator": 1,
        **status,
    }  # fmt: skip
    return {
        "apiVersion": "carpool.dev/v1alpha1",
        "kind": "BatchingPolicy",
        "metadata": {
            "name": name, "namespace": "shop", "uid": "u", "generation": 3, "creationTimestamp": at(days=5),
            **({"annotations": annotations} if annotations else {}),
        },
        "spec": {
            "slo": {"latency": {"p99": "50ms", "p50": "10ms"}},
            "targetRefs": [{"name": target} for target in targets],
        },
        **({} if conditions is None else {"status": written}),
    }  # fmt: skip


class Kubectl:
    """The fake, and the plugin run against it."""

    def __init__(self, folder) -> None:
        self._folder = folder
        self._state = {"policies": [], "stderr": "", "printed": None, "workloads": {}}
        program = folder / "kubectl"
        program.write_text(FAKE.format(python=sys.executable, folder=str(folder)))
        program.chmod(0o755)
        self.holds()

    policy = staticmethod(policy)
    condition = staticmethod(condition)

    def holds(self, *policies):
        self._write(policies=list(policies))

    def has(self, workload, **annotations):
        workloads = {f"carpool.dev/{name.replace('_', '-')}": value for name, value in annotations.items()}
        self._write(workloads=self._state["workloads"] | {workload: workloads})

    def knows(self, *, nodes, pods):
        self._write(nodes=nodes, pods=pods)

    def fails(self, stderr):
        self._write(stderr=stderr)

    def prints(self, text):
        self._write(printed=text)

    def _write(self, **changes):
        self._state |= changes
        (self._folder / "state.json").write_text(json.dumps(self._state))

    @property
    def annotations(self):
        state = json.loads((self._folder / "state.json").read_text())
        return [each["metadata"].get("annotations", {}) for each in state["policies"]]

    @property
    def asked(self):
        path = self._folder / "asked"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def run(self, *arguments):
        result = CliRunner().invoke(main, [str(each) for each in arguments], prog_name="kubectl carpool")
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
        return result


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    return Kubectl(tmp_path)
