"""Learning from counters: latency model, server concurrency, arrivals, load, batchable share, misses."""
