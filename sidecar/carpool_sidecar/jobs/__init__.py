"""Submit and poll: requests that nobody waits for, kept on disk and run in the time that interactive ones leave."""
