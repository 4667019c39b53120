"""The fast path: usual queries, answered inside the server's HTTP protocol without an ASGI cycle."""
