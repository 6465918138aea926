"""What a sidecar would break or bypass: pure checks of a workload and the objects around it."""
