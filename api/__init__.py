"""HTTP: what a router asks, in the two dialects that routers speak already.

Owns the FastAPI application (`app`), the hot routes from bytes to bytes (`hot`, on `decoding`, `questions`,
`answers`), the routes for people and tools (`workers`, `dump`, `feed`, `service`), the engines that a service without a
log reads itself (`register`, `registrations`), problem documents (`problems`), metrics and the server.
Imports `indexer`, `kv_events`, and `publisher` for those engines. Everything runs in the event loop of the consumer, so
a request reads the views between two slices of its work and needs no lock.

Start at `app.create_app`, then `hot`.
"""
