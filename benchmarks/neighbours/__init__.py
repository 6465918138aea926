"""`make neighbours`: healthy callers beside callers that misbehave, one kind after the other."""
