"""Errors of the engine side, other than invalid values."""

from kv_events.errors import KvsightError


class CacheStateError(KvsightError):
    """A tree is inconsistent, or a node or a lock was used incorrectly. Names both figures."""


class TransferError(KvsightError):
    """A copy between device and host failed twice and cannot be undone: the cache must be reset."""


class PoolExhaustedError(KvsightError, RuntimeError):
    """A pool has no room, and eviction found none. Names what was requested. May succeed after locks are released."""

    retriable = True


class PoolError(KvsightError):
    """Rows were freed that were not allocated, or not from this pool. Detected only in debug mode."""


class StackError(KvsightError, RuntimeError):
    """A hybrid stack could not be built. Names the pools and the step. Everything that was opened has been closed."""
