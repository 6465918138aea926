"""A running sidecar: how it is started, asked and shown."""
