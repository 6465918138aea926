"""The client: connections to an upstream, and calls on them."""
