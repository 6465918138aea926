"""The kinds of workloads whose pods may have sidecars: one file a kind, and the registry of them."""
