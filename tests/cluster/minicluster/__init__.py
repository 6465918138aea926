"""A small Kubernetes of the tests' own: a real control plane, and a node that runs containers as local processes."""
