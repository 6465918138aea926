"""Signed documents, and their delivery to the sidecars."""
