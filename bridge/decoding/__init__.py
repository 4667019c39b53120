"""Bytes of an engine's messages -> columns of events.

`decoder.Decoder` turns payloads into the runs of `runs`. The kernels read msgpack in place, with
`kv_events.kernels.msgpack`: `batches` finds a batch's events, `fields` and `tokens` read one event,
`runs` joins neighbours, and `scan` drives them all. `hashes` and `stream` build on this room; it imports
neither.
"""
