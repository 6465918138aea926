"""What people write: SLO, objective, bounds, parameters, and how they are read."""
