"""The batch axis is verified before requests are merged: the same rows, alone and in a batch, give the same answers.

``check`` decides, from answers, what is sent as a trial and what is known after it; ``samples`` keeps the requests that
trials are made of; ``verifier`` sends copies through the Batcher and acts on what they show.
"""
