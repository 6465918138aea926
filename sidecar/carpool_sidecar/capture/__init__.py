"""Port capture: a pod's traffic to the model's port is led to the sidecar, by the pod's own kernel."""
