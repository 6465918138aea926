"""Jobs, files and batches on disk."""
