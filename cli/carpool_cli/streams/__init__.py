"""Loads of token streams on the twin of an engine: what the commands forecast and recommend for them."""
