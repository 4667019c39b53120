"""One engine's messages in order: gaps, replays, lost connections, restarts.

`subscriber.Subscriber` owns the socket. `engine_stream.EngineStream` puts the batches of one engine in order with the
help of `sequence_check` and `replay`. `rank_streams.RankStreams` decodes them and applies them to worker streams.
"""
