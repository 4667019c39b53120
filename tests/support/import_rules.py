"""Which package may import which others of the project."""

MAY_IMPORT: dict[str, set[str]] = {
    "kv_events": set(),
    "engine_cache": {"kv_events"},
    "publisher": {"kv_events"},
    "bridge": {"kv_events", "publisher"},
    "indexer": {"kv_events"},
    "analysis": {"kv_events", "indexer", "selection"},
    "selection": {"kv_events", "indexer"},
    "api": {"kv_events", "indexer", "selection", "analysis", "bridge"},
    "simulation": {"kv_events", "engine_cache", "publisher", "indexer", "selection", "analysis"},
}
MAY_IMPORT["kvsight"] = set(MAY_IMPORT)
