"""numba kernels on flat arrays, without I/O and without Python objects per page.

`holder_sets` interns sets of (worker stream, tier) bits, `apply` changes the index page by page, and `find` walks a
prompt. The page table is `kv_events.kernels.page_table`, which publishers use, too. Start at `apply`.
"""
