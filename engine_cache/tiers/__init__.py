"""The tiers of a cache, and the copies between them. All tiers except the device are optional.

    DeviceTier <── HostTier (HostLeaves, Backups, LoadBacks) <── StorageTier

Each tier has access to the one above it. `device.py` and `host.py` decide what is evicted, `backup.py` and `host.py`
move data between device and host, `storage.py` archives and prefetches. `transfer.py`, `copying.py` and `storage_io.py`
run the copies. Start at `device.py`, then `host.py`.
"""
