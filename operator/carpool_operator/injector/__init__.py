"""Decides which pods get a sidecar, and changes them. Pure functions, called by the webhook."""
