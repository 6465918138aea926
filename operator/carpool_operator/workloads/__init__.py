"""The kinds of workloads whose pods may have sidecars: one file per kind, and their registry."""
