"""Where the metrics for decisions come from."""
