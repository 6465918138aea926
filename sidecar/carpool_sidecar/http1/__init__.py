"""HTTP/1.1 for a proxy that counts microseconds: a server and a client on asyncio protocols.

Callbacks, not coroutines: a request costs no task and no future. Runs on asyncio's loop and on uvloop.
"""
