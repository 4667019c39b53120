"""The fast path: most queries are answered inside the server's HTTP protocol, without an ASGI cycle."""
