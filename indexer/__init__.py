"""The router side: event log -> worker views -> overlap scores.

Owns the index (`index`, on numba kernels), the state of every worker stream (`views`, `namespaces`, `freshness`), the
loop that updates them (`consumer`, from `sources`, with `snapshots`), and `replay` of earlier moments. Imports
`kv_events` only; nothing here knows HTTP.

Start at `consumer`, then `applier`, `views`, `index`.
"""
