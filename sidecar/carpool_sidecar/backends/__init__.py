"""Backends that serve the models: a server beside this process, or a file inside it."""
