"""The tuner's loop: counters to its process, decisions to the Batcher, and the guard for outside parameters."""
