"""Bytes of an engine's messages -> columns of events.

`decoder.Decoder` turns messages into the runs of `events`. The kernels read msgpack in place, with
`kv_events.kernels.msgpack`: `fields` and `tokens` read one event, `runs` joins neighbours, and `scan` drives them all.
`hashes` and `stream` build on this room; it imports neither.
"""
