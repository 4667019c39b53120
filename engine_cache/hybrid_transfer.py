"""HybridCacheController: the pages of models that keep more than KV, and what moves along with them. No torch.

    KV ──────────────── rows a page, taken and freed as ever
    ├── on its rows     (the index of sparse attention): resolved from KV's transfer, never allocated
    └── rows of its own (recurrent states, windows): allocated with KV's, all or nothing

Between device and host one operation moves all of it, and one acknowledgement stands for all. In a store nobody finds
KV without the rest: what lives on its rows is written before it, and a page counts as read when both are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from engine_cache.copying import CopyEngine
from engine_cache.pool_entry import HostPoolGroup
from engine_cache.storage.base import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransfer
from engine_cache.storage_operations import ArchiveOperation, PrefetchOperation, StorageOperation
from engine_cache.transfer import HiCacheController, Side, num_leading, num_rows
from engine_cache.types import IndexArray
from kv_events.errors import InvalidValueError


class HybridCacheController(HiCacheController):
    """Moves the pages of KV and the state of the pools beside it, its sidecars.

    group: all pools; the anchor is KV. transfer_layer_num: layers of the model; None: as many as KV has. Raises as
    `HiCacheController` does. In `write` and `load`, extra_pools are the rows of sidecars that move along: those without
    rows on the other side are given some, and InvalidValueError is raised for one that is not in the group, has nothing
    to start from or other numbers of rows on both sides, and when a pool that lives on KV's rows is left out.
    """

    def __init__(self, group: HostPoolGroup, engine: CopyEngine, *, transfer_layer_num: int | None = None) -> None:
        self._set_up(group, engine, transfer_layer_num)

    # --- device and host --------------------------------------------------------------------------------------------

    def _resolve_pool_transfers_allocation(self, transfers: Sequence[PoolTransfer], wanted: Side) -> bool:
        """Give every transfer the rows it lacks on the side `wanted`; False when one pool has no room, and then none
        has been given any, nor after an error. Those that share rows come last."""
        self._check_transfers(transfers, wanted)
        with ExitStack() as undo:
            for transfer in transfers:
                if getattr(transfer, wanted) is None and self.group.source_of(transfer) is None:
                    if not self._take_rows(transfer, wanted):
                        return False
                    undo.callback(self._give_back, transfer, wanted)
            undo.pop_all()
        for transfer in transfers:
            source = self._source(transfer, transfers)
            if source is not None:
                transfer.host_indices, transfer.device_indices = source.host_indices, source.device_indices
        return True

    def _check_transfers(self, transfers: Sequence[PoolTransfer], wanted: Side) -> None:
        """Every transfer has the rows it starts from, or the rows of another to share, and KV moves with every pool
        that lives on its rows."""
        for transfer in transfers:
            name, given = transfer.name.value, transfer.device_indices
            if wanted == "device_indices":
                given = transfer.host_indices
            if self._source(transfer, transfers) is None and given is None:
                raise InvalidValueError(f"transfer of pool {name}", transfer, f"a source for its {wanted}")
            there = getattr(transfer, wanted)
            if given is not None and there is not None and len(given) != len(there):
                raise InvalidValueError(
                    f"{wanted} of pool {name}", len(there), f"as many as on the other side, {len(given)}"
                )
        left = {entry.name for entry in self.group.sharing_entries()} - {transfer.name for transfer in transfers}
        if left and num_rows(transfers[0]):
            missing = sorted(name.value for name in left)
            raise InvalidValueError("transfers", [each.name.value for each in transfers], f"{missing}, too")

    def _source(self, transfer: PoolTransfer, transfers: Sequence[PoolTransfer]) -> PoolTransfer | None:
        """The transfer whose rows another one shares; None: it has its own. Raises InvalidValueError if it is not there
        or shares rows itself."""
        name = self.group.source_of(transfer)
        if name is None:
            return None
        source = next((each for each in transfers if each.name is name), None)
        if source is None or self.group.source_of(source) is not None:
            raise InvalidValueError(
                f"transfer of pool {transfer.name.value}", transfer, f"one of {name.value} beside it"
            )
        return source

    def _give_back(self, transfer: PoolTransfer, wanted: Side) -> None:
        if self.group.source_of(transfer) is None:
            super()._give_back(transfer, wanted)
        else:
            setattr(transfer, wanted, None)  # the rows are another's

    # --- host and store ---------------------------------------------------------------------------------------------

    def find_pages(self, backend: HiCacheStorage, operation: PrefetchOperation) -> int:
        if not operation.extras:
            return super().find_pages(backend, operation)
        return backend.batch_exists_v2(operation.keys, operation.extras).kv_hit_pages

    def fetch_pages(
        self, backend: HiCacheStorage, operation: PrefetchOperation, keys: list[str], rows: IndexArray
    ) -> int:
        arrived = super().fetch_pages(backend, operation, keys, rows)
        hits, rows = operation.extra_pool_hit_pages, rows[: arrived * self.group.page_size]
        for extra in self._resolve_shared_pool_transfers(operation, keys[:arrived], rows):
            arrived = min(arrived, num_leading(backend.batch_get_v2([extra])[extra.name]))
            hits[extra.name] = hits.get(extra.name, 0) + arrived
        return arrived

    def fetch_extras(
        self, backend: HiCacheStorage, operation: PrefetchOperation, hit_pages: int, max_pages: int
    ) -> bool:
        aimed = [_aimed(extra, operation.keys[:hit_pages]) for extra in self._own(operation)]
        batch = _next_batch(aimed, operation.extra_pages, max_pages)
        if batch is None:
            return False
        _, extra = batch
        done = backend.batch_get_v2([extra])[extra.name]
        operation.extra_pages += len(done)
        hits = operation.extra_pool_hit_pages
        hits[extra.name] = hits.get(extra.name, 0) + sum(done)
        return True

    def archive_pages(
        self, backend: HiCacheStorage, operation: ArchiveOperation, keys: list[str], rows: IndexArray
    ) -> int:
        ready = len(keys)
        for extra in self._resolve_shared_pool_transfers(operation, keys, rows):
            ready = min(ready, num_leading(backend.batch_set_v2([extra])[extra.name]))
        return super().archive_pages(backend, operation, keys[:ready], rows[: ready * self.group.page_size])

    def archive_extras(self, backend: HiCacheStorage, operation: ArchiveOperation, max_pages: int) -> bool:
        """As above. KV without the state that it needs on every page is taken off the operation."""
        batch = _next_batch(self._own(operation), operation.extra_pages, max_pages)
        if batch is None:
            return False
        first, extra = batch
        done = backend.batch_set_v2([extra])[extra.name]
        operation.extra_pages += len(done)
        if extra.hit_policy is PoolHitPolicy.ALL_PAGES and not all(done):
            del operation.keys[first + num_leading(done) :]
        return True

    def _own(self, operation: StorageOperation) -> list[PoolTransfer]:
        """What moves along with rows of its own."""
        return [extra for extra in operation.extras if self.group.source_of(extra) is None]

    def _resolve_shared_pool_transfers(
        self, operation: StorageOperation, keys: list[str], host_indices: IndexArray
    ) -> list[PoolTransfer]:
        """What moves along with some pages of KV because it lives on their rows: transfers with these rows, and with
        these keys unless they have some. Those of the operation stay as they are, for the next batch.

        keys, host_indices: the pages, cut to what the store has; without any there is nothing to move. Raises
        InvalidValueError for a source that the operation does not move, and when keys and rows do not fit.
        """
        if not keys:
            return []
        sources = {extra.name: extra for extra in self._own(operation)}
        sources[PoolName.KV] = PoolTransfer(PoolName.KV, host_indices=host_indices, keys=keys)
        resolved = []
        for extra in operation.extras:
            name = self.group.source_of(extra)
            if name is None:
                continue
            source = sources.get(name)
            if source is None or source.host_indices is None:
                known = ", ".join(sorted(each.value for each in sources))
                raise InvalidValueError(f"source of pool {extra.name.value}", name.value, f"one of {known}, with rows")
            own = source.keys if extra.keys is None else extra.keys
            if own is None or len(own) * self.group.page_size != len(source.host_indices):
                expected = f"{len(source.host_indices)} rows in pages of {self.group.page_size}"
                raise InvalidValueError(f"keys of pool {extra.name.value}", len(own or ()), expected)
            resolved.append(replace(extra, keys=own, host_indices=source.host_indices))
        return resolved


def _next_batch(transfers: Sequence[PoolTransfer], done_pages: int, max_pages: int) -> tuple[int, PoolTransfer] | None:
    """What moves after `done_pages` pages of these transfers, one after the other: the page of its own transfer with
    which it begins, and a transfer of at most `max_pages` pages. None: all has moved."""
    for transfer in transfers:
        assert transfer.keys is not None
        assert transfer.host_indices is not None
        num_pages = len(transfer.keys)
        if done_pages < num_pages:
            rows_a_page = len(transfer.host_indices) // num_pages
            end = min(done_pages + max_pages, num_pages)
            rows = transfer.host_indices[done_pages * rows_a_page : end * rows_a_page]
            return done_pages, replace(transfer, keys=transfer.keys[done_pages:end], host_indices=rows)
        done_pages -= num_pages
    return None


def _aimed(extra: PoolTransfer, keys: list[str]) -> PoolTransfer:
    """A sidecar's read for a prefix of these pages: all of them, or the last ones by its policy."""
    assert extra.host_indices is not None
    window = max(1, len(extra.keys or ()))
    rows_a_page = len(extra.host_indices) // window
    wanted = min(len(keys), window) if extra.hit_policy is PoolHitPolicy.TRAILING_PAGES else len(keys)
    rows = extra.host_indices[: wanted * rows_a_page]
    return PoolTransfer(extra.name, host_indices=rows, keys=keys[len(keys) - wanted :])
