"""Bytes of an engine's messages -> columns of events.

`decoder.Decoder` turns payloads into the runs of `runs`. The kernels read msgpack in place, with
`kv_events.msgpack_kernels`: `batch_kernels` finds a batch's events, `field_kernels` and `token_kernels` read one event,
`run_kernels` joins neighbours, and `scan_kernels` drives them all. `naming` and `stream` build on this room; it imports
neither.
"""
