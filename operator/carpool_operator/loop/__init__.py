"""The leader's loop: what a pass reads, decides and does."""
