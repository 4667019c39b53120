"""Pages in a Mooncake store, which the machines of a fleet share.

The store reads and writes host pages in place, one object per contiguous run of memory, without a copy in between. It
may evict any object at any time, and its content is lost when its master ends.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from engine_cache.settings import MooncakeSettings
from engine_cache.storage.base import HiCacheStorage, PagedHostPool, PoolName, StorageClosedError, ZeroCopyHostPool
from engine_cache.storage.mooncake_client import MasterState, MooncakeClient, StorageUnreachableError
from engine_cache.storage.object_names import PAGE_KEY_PATTERN, StorageIdentity
from engine_cache.types import no_indices
from kv_events.errors import InvalidValueError
from kv_events.schema import StorageMedium

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_KEY = re.compile(PAGE_KEY_PATTERN)
_LOOK_AGAIN_PAGES = 1024
_MOST_LOOKS = 3  # per batch
_LENDER_TTL_S = 15.0
"""Time after which the master has dropped the objects of a machine that died (10 s by default)."""
_STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class _Objects:
    """The objects of some pages, page by page, the same number for each page."""

    names: list[str]
    addresses: list[int]
    sizes: list[int]

    def only(self, wanted: Sequence[bool]) -> _Objects:
        lists = (self.names, self.addresses, self.sizes)
        return _Objects(*(list(compress(each, wanted)) for each in lists))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class _Registered:
    pool: ZeroCopyHostPool
    buffers: list[torch.Tensor]
    name_ends: list[str]
    """One per object of a page."""
    page_bytes: int


class MooncakeStorage(HiCacheStorage):
    """One rank's view of a Mooncake store. Host pools must not have the layout `layer_first`.

    client: closed together with the storage. Raises what `MooncakeClient` raises. While the store is unreachable, reads
    and writes return False and its pages are withdrawn; it is used again when it is back. A call returns within the
    client's time limit, or within a minute if a machine that lends memory hangs.
    """

    medium: ClassVar[StorageMedium] = StorageMedium.EXTERNAL

    def __init__(self, client: MooncakeClient, identity: StorageIdentity, settings: MooncakeSettings) -> None:
        super().__init__(settings.mooncake_max_tracked_pages)
        self._client = client
        self._identity = identity
        self._owns_store = settings.mooncake_owns_store
        self._registered: dict[PoolName, _Registered] = {}
        client.on_away = self._held.lose_all
        self._watch = MooncakeWatch(client, settings.mooncake_watch_interval_s, self._look_again)
        client.on_transfer_failed = self._watch.suspect

    @classmethod
    def connect(cls, identity: StorageIdentity, settings: MooncakeSettings | None = None) -> MooncakeStorage:
        """Create a storage with its own client. settings: None for those of the environment."""
        settings = settings or MooncakeSettings()
        return cls(MooncakeClient(settings, tp_size=identity.tp_size), identity, settings)

    def clear(self) -> None:
        """See `HiCacheStorage`.

        With `mooncake_owns_store` the whole store is emptied. Raises StorageUnreachableError if the master does not
        answer.
        """
        self._check_open()
        self._client.remove_matching(None if self._owns_store else self._identity.object_pattern)
        for keys in _batches(self._held.forget_all()):
            self._hold_seen(keys)  # written during the call

    def _size(self) -> tuple[int, int]:
        kv, num_held = self._registered.get(PoolName.KV), len(self._held)
        return num_held, num_held * kv.page_bytes if kv else 0

    def close(self) -> None:
        """Leave the store. Pages in the memory that this client lends are lost to all engines; others stay."""
        super().close()
        self._watch.stop()
        if self._client.close():
            self._held.forget_all()
            self._registered = {}

    def _register(self, name: PoolName, pool: PagedHostPool) -> None:
        self._check_open()
        if not isinstance(pool, ZeroCopyHostPool):
            raise InvalidValueError(f"host pool {name.value}", type(pool).__name__, "a pool with pages to use in place")
        pool.get_page_buffer_meta(no_indices())  # raises for layer_first
        _, sizes = pool.get_page_buffer_meta(np.arange(pool.page_size))
        name_ends = self._identity.object_names(name, len(sizes))
        buffers = pool.get_hybrid_pool_buffer()
        self._register_buffers(name, buffers)
        super()._register(name, pool)
        self._registered[name] = _Registered(pool, buffers, name_ends, sum(sizes))

    def unregister_host_pools(self) -> None:
        super().unregister_host_pools()
        self._held.forget_all()  # no cache can read or announce these pages now
        registered, self._registered = self._registered, {}
        with contextlib.suppress(StorageClosedError):
            for address in {buffer.data_ptr() for each in registered.values() for buffer in each.buffers}:
                self._client.unregister(address)

    def _register_buffers(self, name: PoolName, buffers: Sequence[torch.Tensor]) -> None:
        known = {buffer.data_ptr() for each in self._registered.values() for buffer in each.buffers}
        kept = {buffer.data_ptr() for buffer in buffers}
        with contextlib.ExitStack() as undo:
            for buffer in buffers:
                if buffer.data_ptr() not in known:
                    self._client.register(name.value, buffer.data_ptr(), buffer.nbytes)
                    undo.callback(self._client.unregister, buffer.data_ptr())
            undo.pop_all()
        before = self._registered[name].buffers if name in self._registered else []
        for address in {buffer.data_ptr() for buffer in before} - kept:
            self._client.unregister(address)

    def _present(self, name: PoolName, keys: Sequence[str]) -> list[bool]:
        return [bool(there) for there in self._look(name, keys)]

    def _look(self, name: PoolName, keys: Sequence[str]) -> list[bool | None]:
        """Return whether each page is stored, or None if the store did not answer. Drops missing pages."""
        moment = self._held.moment
        there = self._pages_there(name, self._client.exist(self._names(name, keys)))
        if name is PoolName.KV:
            self._held.lose(_missing(keys, there), moment)
        return there

    def _read(self, name: PoolName, pool: PagedHostPool, keys: Sequence[str], rows: list[int]) -> list[bool]:
        objects, moment = self._objects(name, keys, rows), self._held.moment
        read, odd = self._client.get(objects.names, objects.addresses, objects.sizes)
        if self._identity.use_fingerprint:  # otherwise they may be valid pages of another layout
            self._remove_damaged(name, objects, odd)
        there, done = self._pages_there(name, read), self._whole_pages(name, read)
        if name is PoolName.KV:
            self._held.hold(compress(keys, done), moment)
            self._held.lose(_missing(keys, there), moment)
        self._count(num_read=sum(done), num_missed=len(done) - sum(done))
        return done

    def _remove_damaged(self, name: PoolName, objects: _Objects, odd: Sequence[bool]) -> None:
        """Remove objects of the wrong length, which would otherwise stay forever and never be readable."""
        self._client.remove(list(compress(objects.names, odd)))
        self._count(num_damaged=self._whole_pages(name, [not each for each in odd]).count(False))

    def _write(self, name: PoolName, pool: PagedHostPool, keys: Sequence[str], rows: list[int]) -> list[bool]:
        objects, moment = self._objects(name, keys, rows), self._held.moment
        there = self._client.exist(objects.names)
        missing = objects.only([not each for each in there])
        written = self._client.put(missing.names, missing.addresses, missing.sizes)
        before, stored = self._whole_pages(name, there), iter(written)
        done = self._whole_pages(name, [each or next(stored) for each in there])
        if name is PoolName.KV:
            self._held.hold(compress(keys, before), moment)
            self._hold_seen([key for key, was, now in zip(keys, before, done, strict=True) if now and not was])
        self._count(
            num_already_stored=sum(before), num_written=sum(done) - sum(before), num_failed_writes=len(done) - sum(done)
        )
        return done

    def _hold_seen(self, keys: Sequence[str]) -> None:
        """Hold the pages that a lookup finds.

        A put also succeeds for a page that another engine is still writing and may never finish, so its success is not
        sufficient. The lookup is repeated if everything was lost during it.
        """
        for _ in range(_MOST_LOOKS):
            moment = self._held.moment
            seen = self._whole_pages(PoolName.KV, self._client.exist(self._names(PoolName.KV, keys)))
            if self._held.hold(compress(keys, seen), moment):
                return

    def _look_again(self) -> None:
        """Look up all held pages and drop missing ones. Raises StorageUnreachableError unless all were answered."""
        unclear = sum(self._look(PoolName.KV, keys).count(None) for keys in _batches(self._held.keys()))
        if unclear:
            text = f"the Mooncake store of master {self._client.address} gave no answer for {unclear} pages"
            raise StorageUnreachableError(text)

    def _names(self, name: PoolName, keys: Sequence[str]) -> list[str]:
        prefix, ends = self._identity.prefix, self._known(name).name_ends
        for key in keys:
            if not _KEY.fullmatch(key):
                raise InvalidValueError("storage key", key, "a result of page_key()")
        return [f"{prefix}{key}{end}" for key in keys for end in ends]

    def _objects(self, name: PoolName, keys: Sequence[str], rows: list[int]) -> _Objects:
        names, pool = self._names(name, keys), self._known(name).pool
        first = np.array(rows, dtype=np.int64)
        return _Objects(names, *pool.get_page_buffer_meta((first[:, None] + np.arange(pool.page_size)).reshape(-1)))

    def _whole_pages(self, name: PoolName, done: Sequence[bool | None]) -> list[bool]:
        return [all(objects) for objects in self._by_page(name, done)]

    def _pages_there(self, name: PoolName, there: Sequence[bool | None]) -> list[bool | None]:
        """Return whether each page is stored. None if an object is unknown and no other is missing."""
        return [False if False in page else (None if None in page else True) for page in self._by_page(name, there)]

    def _by_page(self, name: PoolName, objects: Sequence[bool | None]) -> list[Sequence[bool | None]]:
        num_objects = len(self._known(name).name_ends)
        return [objects[first : first + num_objects] for first in range(0, len(objects), num_objects)]

    def _known(self, name: PoolName) -> _Registered:
        registered = self._registered.get(name)
        if registered is None:  # unregistered since the call began
            self._check_open()
            raise InvalidValueError("pool", name.value, "a registered pool")
        return registered


class MooncakeWatch:
    """A thread that probes the master every `interval_s` seconds.

    look_again: looks up all held pages. Called on the watch's thread when the master is back or has lost its objects,
    and `_LENDER_TTL_S` after a machine that lends memory did not answer.
    """

    def __init__(self, client: MooncakeClient, interval_s: float, look_again: Callable[[], None]) -> None:
        self._client = client
        self._interval_s = interval_s
        self._look_again = look_again
        self._is_emptied = False  # the store was emptied and no lookup has run since; watch thread only
        self._lock = threading.Lock()  # guards the fields below
        self._suspicious_until: float | None = None  # monotonic time at which a lookup is due
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"mooncake-watch:{client.address}", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # a native call must not run at interpreter exit

    def suspect(self) -> None:
        """Report that a machine did not answer. Schedules a lookup for when the master has noticed. Any thread."""
        with self._lock:
            self._suspicious_until = time.monotonic() + _LENDER_TTL_S

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(_STOP_TIMEOUT_S)
        atexit.unregister(self.stop)

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            try:
                self._look()
            except StorageClosedError:
                return
            except Exception:
                logger.exception("looking after Mooncake master %s failed", self._client.address)

    def _look(self) -> None:
        state = self._client.probe()
        self._is_emptied |= state is MasterState.EMPTIED
        due = self._suspicious_until
        is_due = due is not None and time.monotonic() > due
        if state is MasterState.AWAY or not (is_due or self._is_emptied):
            return
        self._look_again()  # stays due if this raises
        self._is_emptied = False
        with self._lock:
            if is_due and self._suspicious_until == due:  # otherwise another machine did not answer
                self._suspicious_until = None


def _batches(keys: list[str]) -> Iterator[list[str]]:
    return (keys[first : first + _LOOK_AGAIN_PAGES] for first in range(0, len(keys), _LOOK_AGAIN_PAGES))


def _missing(keys: Sequence[str], there: Sequence[bool | None]) -> list[str]:
    return [key for key, is_there in zip(keys, there, strict=True) if is_there is False]
