"""Decisions for a fleet: evidence, its validity, canaries, and steering."""
