"""Decisions for a fleet: evidence, trust in it, canaries, and steering."""
