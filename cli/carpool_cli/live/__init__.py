"""A running sidecar: starts, queries and shows it."""
