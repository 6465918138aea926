"""Puts the sidecar into pods as they are created."""
