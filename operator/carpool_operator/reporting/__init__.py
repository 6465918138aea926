"""What the operator reports: conditions, decisions, Events, metrics and health."""
