"""A day of a fleet with an autoscaler: manifests, the autoscaler's rules, replicas and misses."""
