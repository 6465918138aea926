"""The batching sidecar: a proxy in front of a model server that merges requests into batches."""
