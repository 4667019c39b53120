"""The HTTP API, in the two dialects that routers already use.

Imports `indexer`, `kv_events`, `analysis`, and `bridge` for engines that a service without a log reads itself. All code
runs in the event loop of the consumer, so a request reads the views between two slices of the consumer's work and needs
no lock. Start at `app.create_app`, then `service.LiveService`, then `queries.routes`.
"""
