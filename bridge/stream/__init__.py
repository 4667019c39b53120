"""One engine's messages in order: gaps, replays, lost connections, restarts.

`subscriber.Subscriber` owns the socket, `engine_stream.EngineStream` puts one publisher's batches in order with the
help of `continuity` and `replay`, and `ranks.Ranks` decodes them and applies them to the registry's worker streams.
"""
