"""Transfers of several pools between host and store: those that share rows and keys, those that go in batches. No
torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine_cache.storage.base import PoolName, PoolTransfer
from engine_cache.types import IndexArray
from kv_events.errors import InvalidValueError


def resolve_shared_pool_transfers(
    transfers: Sequence[PoolTransfer], keys: list[str], host_indices: IndexArray, page_size: int
) -> list[PoolTransfer]:
    """The transfers of the list that share, with rows, and with keys unless they have some; those given stay as they
    are. keys, host_indices: what moves of KV, cut to what the store has.

    Raises InvalidValueError for a source that is not in the list or has no rows, and when keys and rows do not fit.
    """
    sources = {transfer.name: transfer for transfer in transfers if transfer.indices_from_pool is None}
    sources[PoolName.KV] = PoolTransfer(PoolName.KV, host_indices=host_indices, keys=keys)
    resolved = []
    for transfer in transfers:
        if transfer.indices_from_pool is None:
            continue
        source = sources.get(transfer.indices_from_pool)
        if source is None or source.host_indices is None:
            known = ", ".join(sorted(name.value for name in sources))
            raise InvalidValueError(
                f"source of pool {transfer.name.value}", transfer.indices_from_pool.value, f"one of {known}, with rows"
            )
        own = source.keys if transfer.keys is None else transfer.keys
        if own is None or len(own) * page_size != len(source.host_indices):
            expected = f"{len(source.host_indices)} rows in pages of {page_size}"
            raise InvalidValueError(f"keys of pool {transfer.name.value}", len(own or ()), expected)
        resolved.append(replace(transfer, keys=own, host_indices=source.host_indices))
    return resolved


def next_batch(transfers: Sequence[PoolTransfer], done_pages: int, max_pages: int) -> tuple[int, PoolTransfer] | None:
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
