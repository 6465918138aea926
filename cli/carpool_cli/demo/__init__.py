"""``python -m carpool_cli.demo``: real processes and real input show what a batching that tunes itself is worth."""
