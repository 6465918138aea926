"""Verifies the batch axis before requests are merged: rows must get the same answers with and without batching.

``check`` decides, from answers, which trials are sent and what they prove; ``samples`` keeps the requests that
trials are made of; ``delays`` limits how many requests wait for copies; ``verifier`` sends copies through the Batcher
and acts on the results.
"""
