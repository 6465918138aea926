"""The Batcher: queues, which requests share a batch, when it starts, and what becomes of one that fails."""
