"""What goes wrong on the engine side, beyond bad values."""

from __future__ import annotations

from kv_events.errors import KvsightError


class CacheStateError(KvsightError):
    """A tree is not what it should be, or a node or lock was used against the rules. Names both figures."""


class TransferError(KvsightError):
    """A copy between device and host failed twice and cannot be undone: the cache must be reset."""


class PoolExhaustedError(KvsightError, RuntimeError):
    """A pool has no room and eviction found none. Names what was wanted; possible again once locks are released."""

    retriable = True


class PoolError(KvsightError):
    """Pool rows were freed that were not allocated, or not from this pool. Only debug mode looks for it."""


class StackError(KvsightError, RuntimeError):
    """A hybrid stack could not be built: names the pools and the step. All that was opened has been closed."""
