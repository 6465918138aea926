"""The proof of the gate for token streams: scenarios, other rules and figures, in virtual time."""
