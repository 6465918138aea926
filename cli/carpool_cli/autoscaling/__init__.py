"""Days of a fleet with an autoscaler: manifests, what kube-controller-manager makes of them, replicas and misses."""
