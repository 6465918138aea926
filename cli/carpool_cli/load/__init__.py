"""Load for a server, what comes of it, and a stand-in for the server."""
