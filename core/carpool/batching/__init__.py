"""The Batcher: queues, which requests share a batch, when it starts, and what happens when it fails."""
