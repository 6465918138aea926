"""The `carpool` command line."""
