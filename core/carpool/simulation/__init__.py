"""The Batcher and the tuner in virtual time."""
