"""What sidecar, tuner and operator say to each other."""
