"""What goes from the server to an upstream as it comes: forwarded requests, and other protocols."""
