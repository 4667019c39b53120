"""numba kernels on flat arrays: no I/O, no Python object per page.

`holder_sets` interns sets of (worker stream, tier) bits; `apply` changes the index page by page; `find` walks a prompt.
The table of pages itself is `kv_events.page_table`, which publishers use too. Start at `apply`.
"""
