"""Token streams: a gate that admits the requests an engine can serve within TTFT and TPOT, and a simulated engine."""
