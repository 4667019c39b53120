"""Stores that fail on demand. Their content is read without their own methods.

All kinds that are watched have `broken` (reads and writes raise), `full` (pools that accept no more pages),
`acknowledged` (keys of KV pages whose write returned true, as did all writes before them in the batch), `bare` (keys of
KV pages stored although their index was refused), `held` (keys of the stored KV pages), `harm`, and `discard`, which
closes the store and deletes its content.
"""

import re
import tempfile
from collections import deque
from itertools import takewhile
from pathlib import Path

from engine_cache import StoragePolicy
from engine_cache.storage.base import HiCacheStorage, PoolName
from engine_cache.storage.directory import DirectoryStorage
from kv_events.schema import StorageMedium
from tests.models.page_names import block_hash

_FILE = re.compile(r"[0-9a-f]{20}_((?:[0-9a-f]{16}_)?[0-9a-f]{64})_m(?:_0_1)?\.bin")


def page_hashes(tokens):
    """Return the keys of the pages of a prompt, two tokens each."""
    return [block_hash(tuple(tokens[:end]), 2, False).hex() for end in range(2, len(tokens) + 1, 2)]


class MemoryStorage(HiCacheStorage):
    """A store in a dict. `refused`: a set of (pool, position in a batch) that it does not write."""

    medium = StorageMedium.DISK
    broken, full = False, ()

    def __init__(self):
        super().__init__()
        self.pages, self.removed = {}, {}
        self.refused = set()
        self.batches = []  # (what, pool, number of keys)

    def is_held(self, key):
        return (PoolName.KV, key) in self.pages

    def keys_of(self, name):
        return [key for pool, key in self.pages if pool is name]

    def calls(self, what):
        """Return the pool and the number of pages of each call of that kind, and forget them all."""
        calls, self.batches = [(name, number) for kind, name, number in self.batches if kind == what], []
        return calls

    def lose(self, key, name=PoolName.KV):
        del self.pages[name, key]
        self.removed[key] = None

    def take_removed(self):
        removed, self.removed = self.removed, {}
        return [key for key in removed if not self.is_held(key)]

    def clear(self):
        self.pages.clear()
        self.removed.clear()

    def _size(self):
        return len(self.pages), 0

    def _present(self, name, keys):
        self._check("exists", name, keys)
        return [(name, key) in self.pages for key in keys]

    def _read(self, name, pool, keys, rows):
        self._check("get", name, keys)
        done = []
        for key, row in zip(keys, rows, strict=True):
            page = self.pages.get((name, key))
            if page is not None:
                pool.set_from_flat_data_page(row, page)
            done.append(page is not None)
        return done

    def _write(self, name, pool, keys, rows):
        self._check("set", name, keys)
        for place, (key, row) in enumerate(zip(keys, rows, strict=True)):
            if name not in self.full and (name, place) not in self.refused:
                self.pages.setdefault((name, key), pool.get_data_page(row))
        return [(name, key) in self.pages for key in keys]

    def _check(self, what, name, keys):
        self.batches.append((what, name, len(keys)))
        if self.broken:
            raise OSError("injected storage fault")


class _Acknowledging:
    def __init__(self, *args, **params):
        super().__init__(*args, **params)
        self.acknowledged: deque[str] = deque()
        self.bare = set()
        self._refused = set()  # (pool, key) of pages besides KV whose last write was refused

    def batch_set_v2(self, transfers):
        done = super().batch_set_v2(transfers)  # type: ignore[misc]
        for transfer in transfers:
            for key, is_done in zip(transfer.keys, done[transfer.name], strict=True):
                (self._refused.discard if is_done else self._refused.add)((transfer.name, key))
        return done

    def batch_set_v1(self, keys, host_indices):
        self.bare |= {key for key in keys if (PoolName.INDEXER, key) in self._refused}
        done = super().batch_set_v1(keys, host_indices)  # type: ignore[misc]
        self.acknowledged.extend(keys[: sum(takewhile(bool, done))])
        return done


class Failing(_Acknowledging):
    """Adds failures on demand to a store."""

    broken, full = False, ()

    def _present(self, name, keys):
        self._fail_if_broken()
        return super()._present(name, keys)  # type: ignore[misc]

    def _read(self, name, pool, keys, rows):
        self._fail_if_broken()
        return super()._read(name, pool, keys, rows)  # type: ignore[misc]

    def _write(self, name, pool, keys, rows):
        self._fail_if_broken()
        if name not in self.full:
            return super()._write(name, pool, keys, rows)  # type: ignore[misc]
        there = list(super()._present(name, keys))  # type: ignore[misc]
        known = [(key, row) for key, row, is_there in zip(keys, rows, there, strict=True) if is_there]
        done = iter(super()._write(name, pool, [key for key, _ in known], [row for _, row in known]))  # type: ignore[misc]
        return [is_there and next(done) for is_there in there]

    def _fail_if_broken(self):
        if self.broken:
            raise OSError("injected storage fault")


class WatchedMemory(_Acknowledging, MemoryStorage):
    """Pages in a dict."""

    def held(self):
        return {key for name, key in list(self.pages) if name is PoolName.KV}

    def harm(self, draw):
        """Lose a page of any pool and notice it. Returns the keys of KV pages lost unnoticed."""
        pages = list(self.pages)
        if pages:
            name, key = draw.choice(sorted(pages))
            self.lose(key, name)
        return set()

    def discard(self):
        """Close the store and discard its content."""


class WatchedDirectory(Failing, DirectoryStorage):
    """Files in a separate folder."""

    def __init__(self, identity, host_pools, num_pages):
        """identity: of model "m". num_pages: capacity for pages of all pools together."""
        self._temporary = tempfile.TemporaryDirectory()
        page_bytes = sum(pool.get_dummy_flat_data_page().nbytes + 8 for pool in host_pools)
        self._identity = identity
        super().__init__(Path(self._temporary.name), self._identity, capacity_bytes=num_pages * page_bytes)

    def neighbour(self, host_pool):
        """Return another worker's store on the same folder."""
        store = DirectoryStorage(Path(self._temporary.name), self._identity, capacity_bytes=10**6)
        store.register_mem_pool_host(host_pool)
        return store

    def held(self):
        found = (_FILE.fullmatch(path.name) for path in Path(self._temporary.name).iterdir())
        return {match[1] for match in found if match}

    def harm(self, draw):
        """Remove, cut or change a file of any pool. Returns the keys of KV pages lost unnoticed."""
        files = sorted(self._files())
        if not files:
            return set()
        path, kind = draw.choice(files), draw.randrange(3)
        try:
            with path.open("r+b") as file:
                if kind and _damage(file, draw, is_cut=kind == 1):
                    return set()
            path.unlink()
        except FileNotFoundError:  # removed by the store on another thread
            return set()
        match = _FILE.fullmatch(path.name)
        return {match[1]} if match else set()

    def discard(self):
        self._temporary.cleanup()

    def _files(self):
        return [path for path in Path(self._temporary.name).iterdir() if path.suffix == ".bin"]


def _damage(file, draw, *, is_cut):
    """Cut a file or flip a bit. Returns False if it is empty."""
    content = file.read()
    if content:
        place = draw.randrange(len(content))
        file.seek(place)
        if is_cut:
            file.truncate()
        else:
            file.write(bytes([content[place] ^ 1 << draw.randrange(8)]))
    return bool(content)


def is_idle(rig):
    """Return whether no prefetch of a rig is left and nothing is held for one."""
    rig.cache.check_hicache_events()
    tier, nodes = rig.cache.store, [rig.cache.root_node, *(place.node for place in rig.walk())]
    held = [rig.data(node, kind).host_lock_ref for node in nodes for kind in ("full", "swa", "mamba")]
    left = rig.cache.prefetch_tokens_occupied, rig.cache.ongoing_prefetch, tier.io.prefetches, tier.ongoing_archives
    return not any((*left, *held))


def set_policy(rig, threshold=1, **values):
    rig.cache.store.io.policy = StoragePolicy(threshold, batch_pages=2, **values)
