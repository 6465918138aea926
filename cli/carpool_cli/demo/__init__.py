"""``python -m carpool_cli.demo``: shows with real processes and real input what self-tuning batching saves."""
