"""Port capture: the pod's kernel redirects traffic for the model's port to the sidecar."""
