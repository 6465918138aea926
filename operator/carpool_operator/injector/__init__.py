"""Which pods get a sidecar, and how they are changed for it. Pure: the webhook asks."""
