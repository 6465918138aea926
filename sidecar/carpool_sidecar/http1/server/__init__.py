"""The server: connections, their requests, and answers in order."""
