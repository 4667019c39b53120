"""A Mooncake store that fails on demand, with access to the objects that its master holds. See `cache_stores`."""

import contextlib
import secrets
from dataclasses import replace

from engine_cache.storage import PoolName
from engine_cache.storage.mooncake import MooncakeStorage
from engine_cache.storage.mooncake_client import MooncakeClient, StorageUnreachableError
from tests.rigs.cache_stores import Failing


class WatchedMooncake(Failing, MooncakeStorage):
    """Objects under a separate tag in a shared store.

    master: a `MooncakeAccess`. own_client: a separate client, which can lose its master and takes a second to close,
    instead of the shared one.
    """

    def __init__(self, identity, master, *, own_client=False):
        settings = master.settings()
        client = MooncakeClient(settings) if own_client else master.shared_client()
        self._ever = set()  # (pool, key) of all writes
        super().__init__(client, replace(identity, extra_backend_tag=f"t{secrets.token_hex(5)}"), settings)

    def held(self):
        return {key for name, key in self._there() if name is PoolName.KV}

    def harm(self, draw):
        """Drop some objects of a page of any pool. Returns the keys of damaged KV pages."""
        pages = sorted(self._there())
        if not pages:
            return set()
        name, key = draw.choice(pages)
        objects = self._names(name, [key])
        self._client.remove(objects[: 1 + draw.randrange(len(objects))])
        return {key} if name is PoolName.KV else set()

    def discard(self):
        with contextlib.suppress(StorageUnreachableError):
            self.clear()
        self.close()

    def _there(self):
        found, ever = set(), list(self._ever)  # other threads add to it
        for name in PoolName:
            keys = [key for pool, key in ever if pool is name]
            if keys:
                done = self._whole_pages(name, self._client.exist(self._names(name, keys)))
                found |= {(name, key) for key, is_there in zip(keys, done, strict=True) if is_there}
        return found

    def _write(self, name, pool, keys, rows):
        self._ever |= {(name, key) for key in keys}
        return super()._write(name, pool, keys, rows)
