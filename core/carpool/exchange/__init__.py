"""Messages between sidecar, tuner and operator."""
