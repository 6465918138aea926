"""Relays from the server to an upstream without buffering: forwarded requests, and other protocols."""
