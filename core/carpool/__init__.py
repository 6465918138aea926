"""Carpool's core: batching and tuning without a clock, a socket or a thread of its own."""
