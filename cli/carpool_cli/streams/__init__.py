"""Loads of token streams on the twin of an engine: the forecasts and recommendations of the commands."""
