"""`carpool inject --undo`: the manifests as they were."""

from __future__ import annotations

import json

import pytest
import yaml
from manifests_to_inject import KEY, MANIFESTS, template

BLOCK = """\
# A model with everything
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: resnet
  namespace: models
spec:
  serviceName: resnet
  selector:
    matchLabels:
      app: resnet
  template:
    metadata:
      labels:
        app: resnet   # ours
      annotations:
        traffic.sidecar.istio.io/excludeInboundPorts: "9100"
    spec:
      terminationGracePeriodSeconds: 5   # it is quick
      initContainers:
        - name: fetch
          image: aws-cli
      containers:
        - name: server
          image: model   # the model
          ports:
            - name: http
              containerPort: 9000
          readinessProbe:
            httpGet:
              path: /ready
              port: http   # by name
          lifecycle:
            postStart:
              exec:
                command: [warm-up]
      volumes:
        - name: data
          emptyDir: {}
---
# And nothing else
apiVersion: v1
kind: ConfigMap
metadata:
  name: resnet
"""


FLOW = """\
{
  "apiVersion": "apps/v1", kind: 'Deployment', # in braces
  metadata: {name: "resnet"},
  spec: {template: {metadata: {labels: {}}, spec: {
    terminationGracePeriodSeconds: 5, activeDeadlineSeconds: 0x500,
    containers: [
      {name: logs, image: "logs"}, # the first
      {name: server, ports: [{name: "http", containerPort: 9000}], readinessProbe: {httpGet: {path: "/", port: http}}},
    ],
  }}},
}
"""


@pytest.mark.parametrize("options", [("--slo-p99", "50ms"), ("--public-key", KEY)])
def test_undo_restores_the_manifests(inject, options):
    injected = inject(BLOCK, *options).stdout
    assert "name: carpool" in injected
    undone = inject(injected, "--undo")
    assert (undone.exit_code, undone.stderr) == (0, "")
    assert undone.stdout == BLOCK
    assert inject(inject(MANIFESTS, *options, "-n", "models").stdout, "--undo").stdout == MANIFESTS
    in_braces = "".join(f"--- # next\n{FLOW.replace('resnet', name)}" for name in ("one", "two"))
    assert inject(inject(in_braces, *options, "-n", "models").stdout, "--undo").stdout == in_braces
    lines_of_windows = BLOCK.replace("\n", "\r\n")
    injected = inject(lines_of_windows, *options).stdout_bytes
    assert injected.count(b"\n") == injected.count(b"\r\n")
    assert inject(injected.decode(), "--undo").stdout_bytes.decode() == lines_of_windows
    # JSON
    plain = json.dumps(next(yaml.safe_load_all(BLOCK)), indent=4) + "\n"
    assert inject(inject(plain, *options).stdout, "--undo").stdout == plain


def test_comments_that_are_lost_are_named(inject):
    shared = BLOCK.replace("    spec:\n      term", "    spec:\n      <<: {}\n      term")
    result = inject(shared, "--slo-p99", "50ms")
    assert result.exit_code == 0
    assert "initContainers" in template(result.stdout)["spec"]
    assert "statefulset/resnet: written anew, without its comments" in result.stderr


def test_undo_of_what_was_never_injected_changes_nothing(inject):
    result = inject(BLOCK, "--undo")
    assert (result.exit_code, result.stdout) == (0, BLOCK)
    assert "no sidecar by carpool inject is in it" in result.stderr


def test_undo_of_what_was_changed_says_so(inject):
    broken = BLOCK.replace("      annotations:\n", "      annotations:\n        carpool.dev/status: '{}'\n")
    result = inject(broken, "--undo")
    assert result.exit_code == 2
    assert "statefulset/resnet: its sidecar can't be taken out" in result.stderr
    assert inject(BLOCK, "--undo", "--slo-p99", "50ms").exit_code == 2
