"""The HTTP API, in the two dialects that routers already use.

Owns the FastAPI application (`app`), the query routes from bytes to bytes (`hot`, with `decoding`, `questions` and
`answers`), the routes for operators and tools (`workers`, `dump`, `feed`, `service`), the engines that a service
without a log reads itself (`register`, `registrations`), problem documents (`problems`), metrics and the server.
Imports `indexer`, `kv_events`, and `publisher` for those engines. All code runs in the event loop of the consumer, so a
request reads the views between two slices of the consumer's work and needs no lock.

Start at `app.create_app`, then `hot`.
"""
