"""Measures a model: its latency by batch size, its memory, and whether batching is safe for it."""
