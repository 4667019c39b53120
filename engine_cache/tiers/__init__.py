"""The tiers of a cache as objects, and the machinery that moves pages between them.

`device.py` owns the device rows, `host.py` the host tier (with `host_leaves.py`, `backup.py` and `load_back.py`) and
`storage.py` the storage tier. A cache without a host or storage tier has no such object. Copies between device and host
go through `transfer.py`, transfers between host and storage through `storage_io.py`; both run on an engine of
`copying.py`. `cuda.py` needs torch and is imported on demand. Start at `device.py`, then `host.py`.
"""
