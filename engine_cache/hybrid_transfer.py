"""The controller under its former module name."""

from engine_cache.transfer import HybridCacheController as HybridCacheController
