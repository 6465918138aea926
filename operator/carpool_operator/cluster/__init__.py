"""The API server: one client, one watch mechanism, caches, election, and checked writes."""
