"""Load for a server, reports on it, and a stand-in for the server."""
