"""Labels and annotations: what a person writes on a workload, and what the webhook writes on pods."""

from __future__ import annotations

PREFIX = "carpool.dev/"

# What a person writes, on a Deployment or in a pod template
INJECT = PREFIX + "inject"
"""``"true"`` asks for a sidecar, ``"false"`` forbids it; ``"deployment"`` in a template was put there by the webhook."""
SLO_PREFIX = PREFIX + "slo-"
"""Followed by a percentile: ``carpool.dev/slo-p99: 50ms``. Any of these asks for a sidecar, too."""

# What a person writes in a pod template
CONTAINER = PREFIX + "container"
"""Container of the model; by default the first that names a port."""
PORT = PREFIX + "port"
"""The model's port in it, name or number; by default the first that may speak HTTP/1.1."""
CPU = PREFIX + "sidecar-cpu"
"""The sidecar's CPU request."""
MEMORY = PREFIX + "sidecar-memory"
"""The sidecar's memory limit; a quarter of it is requested."""

# What the webhook writes on a pod
INJECTED = PREFIX + "injected"
"""Label, ``"true"`` on a pod with a sidecar."""
TARGET = PREFIX + "target"
"""``Kind/name`` of the workload that the pod belongs to."""
STATUS = PREFIX + "status"
"""JSON: version, container, port, notes."""
SKIPPED = PREFIX + "skipped"
"""``<reason>: <message>``, on a pod that asked for a sidecar and got none."""

ASKED = "true"
FORBIDDEN = "false"
PROPAGATED = "deployment"
"""Values of ``INJECT``."""
