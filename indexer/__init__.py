"""The router side: event log -> worker views -> overlap scores.

Owns the index (`index`, on numba kernels), the state of every worker stream (`views`, `namespaces`, `freshness`), the
loop that keeps them up (`consumer`, from `sources`, with `snapshots`), and the way back in time (`replay`). Imports
`kv_events` only; nothing here knows HTTP.

Start at `consumer`, then `applier`, `views`, `index`.
"""
