"""The choice of parameters: candidates, exploration, safety margin, and the tuner and its states."""
