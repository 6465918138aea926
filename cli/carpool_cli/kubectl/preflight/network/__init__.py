"""Policies by which pods admit callers, and callers may send: Kubernetes' own, Cilium's and Calico's."""
