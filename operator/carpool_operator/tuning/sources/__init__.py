"""Where the evidence comes from."""
