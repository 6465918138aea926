"""Forecasts and recommendations for a load, a device and a policy."""
