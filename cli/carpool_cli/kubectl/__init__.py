"""``kubectl carpool``: what the operator decided, for people with a cluster."""
