"""The admin port: probes, metrics, explanations, and signed changes."""
