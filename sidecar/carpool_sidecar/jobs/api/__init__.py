"""What callers see: the jobs' own interface, and OpenAI's files and batches."""
