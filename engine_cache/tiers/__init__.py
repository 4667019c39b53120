"""The tiers below the device: host and store, as layers of one class.

    RadixCache ── HostLeaves ── Backups ── DeviceEviction ── LoadBacks ── HostTier
                  HostTier ── Archives ── Adoption ── Prefetches ── StorageTier

Each module owns one subject and builds on those before it. Caches derive from `StorageTier` and override what their own
states need. What moves the data lies outside: `transfer.py`, `hybrid_transfer.py` and `storage_io.py`. Start at
`host_tier.py`, then `storage_tier.py`.
"""
