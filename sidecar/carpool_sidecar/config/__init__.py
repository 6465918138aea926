"""The configuration file, and how many open files it allows."""
