"""From parameters to latency, misses and goodput, each with its uncertainty."""
