"""Requests through the Batcher: waiting requests, batches sent to the upstream, and answers to callers."""
