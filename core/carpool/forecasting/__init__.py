"""Forecasts of latency, misses and goodput from parameters, each with its uncertainty."""
