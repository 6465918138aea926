"""Manifests for `carpool inject`, and what its tests read in the result."""

from __future__ import annotations

import yaml

from carpool_sidecar.config.settings import parse

MANIFESTS = """\
# The model, and what leads to it
apiVersion: apps/v1
kind: Deployment
metadata: {name: resnet, namespace: models}
spec:
  replicas: 2   # two of them
  selector: {matchLabels: {app: resnet}}
  template:
    metadata: {labels: {app: resnet}}
    spec:
      containers:
        - name: server
          image: your-model-server   # yours
          ports: [{name: http, containerPort: 9000}]
--- # behind it
apiVersion: v1
kind: Service
metadata: {name: resnet}
spec: {ports: [{port: 80, targetPort: http}]}  # by name
"""
KEY = "ab" * 32


def template(text, index=0):
    return list(yaml.safe_load_all(text))[index]["spec"]["template"]


def config(pod):
    (sidecar,) = pod["spec"]["initContainers"]
    return parse(sidecar["env"][0]["value"].replace("$$", "$"))
