"""Requests through the Batcher: who waits, which batches are with the upstream, and what callers are answered."""
