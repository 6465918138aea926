"""Signed documents, and how they reach the sidecars."""
