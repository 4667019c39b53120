"""HiCacheController: pages between device, host and store, for a tree that says which. No torch; an engine copies.

    tree ── write ──> rows on the host, copy queued ── engine ──> ticket ──> finished_writes ──> tree
    tree ── load ───> rows on the device ── start_loading ── engine ──> ticket ──> finished_loads ──> tree

What moves is a list of transfers, KV first. Here KV is all there is; `hybrid_transfer.py` says what moves along with it
in models that keep more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from engine_cache.copying import CopyEngine, Lane, Step, Ticket
from engine_cache.errors import TransferError
from engine_cache.pool_entry import HostPool, HostPoolGroup, PoolEntry, RowAllocator
from engine_cache.pools.host_rows import require_larger_than_device
from engine_cache.storage.base import HiCacheStorage, PoolName, PoolTransfer
from engine_cache.storage_operations import ArchiveOperation, PrefetchOperation
from engine_cache.types import IndexArray
from kv_events.errors import InvalidValueError

Side: TypeAlias = Literal["host_indices", "device_indices"]
"""The field of a `PoolTransfer` that names the rows a copy goes to."""


class Ack(NamedTuple):
    """An operation that was handed to the engine."""

    ticket: Ticket
    ids: list[int]
    """What the tree called the parts of it."""


class _QueuedLoad(NamedTuple):
    ack_id: int
    transfers: list[PoolTransfer]


class HiCacheController:
    """Moves the pages of one KV pool. Belongs to the thread of its tree, save for what says otherwise; the engine may
    be shared by nobody else.

    kv: the pools whose rows name the pages. transfer_layer_num: layers of the model; None: as many as KV has. Raises
    InvalidValueError for a host that is not larger than its device, and for layers that no pool or no layer of a pool
    answers for.
    """

    def __init__(self, kv: PoolEntry, engine: CopyEngine, *, transfer_layer_num: int | None = None) -> None:
        self._set_up(HostPoolGroup.of(kv), engine, transfer_layer_num)

    def _set_up(self, group: HostPoolGroup, engine: CopyEngine, transfer_layer_num: int | None) -> None:
        self.group = group
        self.kv = group.anchor
        self.entries = group.entries
        self.engine = engine
        require_larger_than_device(self.kv.host_pool.size, self.kv.device_allocator.size)
        self.transfer_layer_num = self.kv.host_pool.layer_num if transfer_layer_num is None else transfer_layer_num
        group.check_layers(self.transfer_layer_num)
        self._next_consumer = 0
        self._forget()

    def _forget(self) -> None:
        self._first_consumer = self._next_consumer  # of those whose loads were not given up
        self._writes: deque[Ack] = deque()
        self._load_queue: list[_QueuedLoad] = []
        self._loads: deque[Ack] = deque()
        self._load_tickets: dict[int, Ticket] = {}

    def reset(self) -> None:
        """Let what runs end, forget what is queued, and free every host page."""
        self.engine.drain()
        self._forget()
        self.group.clear()

    def entry(self, name: PoolName) -> PoolEntry:
        """The pools of that name. Raises InvalidValueError, which lists the known ones."""
        return self.group.entry(name)

    # --- device to host ---------------------------------------------------------------------------------------------

    def write(
        self, device_indices: IndexArray, ack_id: int, extra_pools: Sequence[PoolTransfer] = ()
    ) -> IndexArray | None:
        """Start a backup: host rows that hold the data once `ack_id` is among the finished writes. None: no room, and
        nothing taken. extra_pools: what moves along, for a `HybridCacheController`."""
        kv = PoolTransfer(PoolName.KV, device_indices=device_indices)
        transfers = [kv, *extra_pools]
        lacking = [transfer for transfer in transfers if transfer.host_indices is None]
        if not self._resolve_pool_transfers_allocation(transfers, "host_indices"):
            return None
        try:
            ticket = self.engine.submit(Lane.WRITE, [self._write_step(_moves(transfers))])
        except Exception:
            for transfer in lacking:
                self._give_back(transfer, "host_indices")
            raise
        self._writes.append(Ack(ticket, [ack_id]))
        return kv.host_indices

    def _write_step(self, moves: list[_Move]) -> Step:
        def copy() -> None:
            for name, host, device in moves:
                entry = self.entries[name]
                entry.host_pool.backup_from_device_all_layer(entry.device_pool, host, device)

        return copy

    def finished_writes(self, *, wait: bool = False, wait_for: int | None = None) -> list[Ack]:
        """Backups that have ended, oldest first, up to the first that has not; each is told once. wait: wait for all of
        them; wait_for: for those up to the one with this `ack_id`."""
        for ack in self._writes if wait or wait_for is not None else ():
            ack.ticket.synchronize()
            if wait_for in ack.ids:
                break
        return [self._writes.popleft() for _ in range(_num_finished(self._writes))]

    # --- host to device ---------------------------------------------------------------------------------------------

    def load(
        self, host_indices: IndexArray, ack_id: int, extra_pools: Sequence[PoolTransfer] = ()
    ) -> IndexArray | None:
        """Queue a load for `start_loading`: the device rows it will fill. None: no room, and nothing taken. Raises
        TransferError after a load that failed."""
        self.require_loads()
        kv = PoolTransfer(PoolName.KV, host_indices=host_indices)
        transfers = [kv, *extra_pools]
        if not self._resolve_pool_transfers_allocation(transfers, "device_indices"):
            return None
        self._load_queue.append(_QueuedLoad(ack_id, transfers))
        return kv.device_indices

    def start_loading(self) -> int:
        """Start all queued loads as one operation, layer by layer; its number for `wait_for_layer`, -1 if there was
        none."""
        if not self._load_queue:
            return -1
        moves = _moves([transfer for load in self._load_queue for transfer in load.transfers])
        steps = [self._load_step(layer, moves) for layer in range(self.transfer_layer_num)]
        ticket = self.engine.submit(Lane.LOAD, steps)
        queued, self._load_queue = self._load_queue, []
        self._loads.append(Ack(ticket, [load.ack_id for load in queued]))
        consumer, self._next_consumer = self._next_consumer, self._next_consumer + 1
        self._load_tickets[consumer] = ticket
        return consumer

    def _load_step(self, layer: int, moves: list[_Move]) -> Step:
        def copy() -> None:
            for name, host, device in moves:
                entry = self.entries[name]
                local = entry.local_layer(layer)
                if local is not None:
                    entry.host_pool.load_to_device_per_layer(entry.device_pool, host, device, local)

        return copy

    def wait_for_layer(self, consumer: int, layer: int) -> None:
        """Return once a layer of an operation that `start_loading` began is on the device; -1 is none. Any thread.
        Raises TransferError if its copy failed or a reset gave it up, InvalidValueError for one that never began."""
        if not -1 <= consumer < self._next_consumer:
            raise InvalidValueError("consumer", consumer, f"-1 .. {self._next_consumer - 1}, as start_loading gave it")
        if 0 <= consumer < self._first_consumer:
            raise TransferError(f"load {consumer} was given up in a reset")
        ticket = self._load_tickets.get(consumer)
        if ticket is not None:  # else there is nothing to load, or it is acknowledged already
            ticket.wait_for_step(layer)

    def require_loads(self) -> None:
        """Raises TransferError if a load has failed since the last reset: device rows of the tree hold anything."""
        for ack in self._loads:
            if ack.ticket.error is not None:
                raise TransferError(f"load of {len(ack.ids)} nodes failed: {ack.ticket.error}") from ack.ticket.error

    def finished_loads(self) -> list[Ack]:
        """Loads that have ended, oldest first, up to the first that has not; each is told once. Raises TransferError
        if one failed, then and until a reset: its rows may be in use already."""
        num_finished = _num_finished(self._loads)
        self.require_loads()  # what has failed stays, and so says so again
        finished = [self._loads.popleft() for _ in range(num_finished)]
        ended = {id(ack.ticket) for ack in finished}
        self._load_tickets = {n: ticket for n, ticket in self._load_tickets.items() if id(ticket) not in ended}
        return finished

    # --- host and store ---------------------------------------------------------------------------------------------
    # Called in the jobs of a `StorageIO`, for one batch of an operation.

    def find_pages(self, backend: HiCacheStorage, operation: PrefetchOperation) -> int:
        """Leading pages of the operation that the store can give back, with all that belongs to them."""
        return backend.batch_exists(operation.keys)

    def fetch_pages(
        self, backend: HiCacheStorage, operation: PrefetchOperation, keys: list[str], rows: IndexArray
    ) -> int:
        """Read pages of KV, and what lives on their rows: leading ones of which all has arrived."""
        return num_leading(backend.batch_get_v1(keys, rows))

    def fetch_extras(
        self, backend: HiCacheStorage, operation: PrefetchOperation, hit_pages: int, max_pages: int
    ) -> bool:
        """Read what has rows of its own, at most so many pages, of a prefix that has `hit_pages`; whether there was
        something."""
        return False

    def archive_pages(
        self, backend: HiCacheStorage, operation: ArchiveOperation, keys: list[str], rows: IndexArray
    ) -> int:
        """Write pages of KV, but first what lives on their rows: leading ones of which all is stored."""
        return num_leading(backend.batch_set_v1(keys, rows))

    def archive_extras(self, backend: HiCacheStorage, operation: ArchiveOperation, max_pages: int) -> bool:
        """Write what has rows of its own, at most so many pages; whether there was something."""
        return False

    # --- rows -------------------------------------------------------------------------------------------------------

    def _resolve_pool_transfers_allocation(self, transfers: Sequence[PoolTransfer], wanted: Side) -> bool:
        """Give the transfers, KV first, the rows that they lack on the side `wanted`; False: no room, and nothing
        taken. Raises InvalidValueError for any but KV."""
        kv, *extras = transfers
        if extras:
            names = [extra.name.value for extra in extras]
            raise InvalidValueError("extra_pools", names, f"none: {self.kv.name.value} is all that is moved")
        return self._take_rows(kv, wanted)

    def _take_rows(self, transfer: PoolTransfer, wanted: Side) -> bool:
        """Give a transfer rows of its own on the side `wanted`; False: no room."""
        entry = self.entry(transfer.name)
        alloc = entry.alloc_host if wanted == "host_indices" else entry.alloc_device
        rows = alloc(num_rows(transfer))
        setattr(transfer, wanted, rows)
        return rows is not None

    def _give_back(self, transfer: PoolTransfer, wanted: Side) -> None:
        """Undo `_resolve_pool_transfers_allocation` for one transfer."""
        entry = self.entry(transfer.name)
        pool: HostPool | RowAllocator = entry.host_pool if wanted == "host_indices" else entry.device_allocator
        pool.free(getattr(transfer, wanted))
        setattr(transfer, wanted, None)


def num_rows(transfer: PoolTransfer) -> int:
    """Rows that a transfer moves."""
    rows = transfer.host_indices if transfer.device_indices is None else transfer.device_indices
    return 0 if rows is None else len(rows)


class _Move(NamedTuple):
    name: PoolName
    host: IndexArray
    device: IndexArray


def _moves(transfers: Sequence[PoolTransfer]) -> list[_Move]:
    """The rows of all transfers, one move a pool, in order of first mention; the transfers are not needed any more."""
    hosts: dict[PoolName, list[IndexArray]] = {}
    devices: dict[PoolName, list[IndexArray]] = {}
    for transfer in transfers:
        assert transfer.host_indices is not None
        assert transfer.device_indices is not None
        hosts.setdefault(transfer.name, []).append(transfer.host_indices)
        devices.setdefault(transfer.name, []).append(transfer.device_indices)
    moves = [_Move(name, np.concatenate(hosts[name]), np.concatenate(devices[name])) for name in hosts]
    return [move for move in moves if len(move.host)]


def _num_finished(acks: deque[Ack]) -> int:
    """Leading ones whose jobs have ended."""
    return sum(1 for _ in takewhile(lambda ack: ack.ticket.query(), acks))


def num_leading(done: Iterable[bool]) -> int:
    """Leading pages that have moved."""
    return sum(takewhile(bool, done))
