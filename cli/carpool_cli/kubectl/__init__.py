"""``kubectl carpool``: shows the operator's decisions to users of a cluster."""
