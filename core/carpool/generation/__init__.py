"""Token streams: a gate that admits what an engine serves within TTFT and TPOT, and a twin of the engine."""
