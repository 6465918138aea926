"""The BatchingPolicy resource: its spec, status, CRD and annotations, and the values made from them."""
