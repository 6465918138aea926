"""Token streams: requests to language models are forwarded as they come, observed, and admitted by the gate."""
