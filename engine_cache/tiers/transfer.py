"""The controller that moves pages between device and host for a tree. It does not need torch: an engine does the
copying.

    tree ── write ──> host rows, copy queued ── engine ──> ticket ──> finished_writes ──> tree
    tree ── load ───> device rows ── start_loading ── engine ──> ticket ──> finished_loads ──> tree

One operation is a list of transfers with a single acknowledgement, KV first and then its sidecars:

    KV ──────────────── allocates and frees its rows
    ├── on its rows     (the index of sparse attention): copied with KV, without a transfer of its own
    └── rows of its own (recurrent states, windows): allocated together with KV's, all or nothing
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from engine_cache.errors import TransferError
from engine_cache.pools.allocators import require_larger_than_device
from engine_cache.pools.entry import HostPoolGroup, PoolEntry, RowAllocator
from engine_cache.storage.base import PoolName, PoolTransfer
from engine_cache.tiers.copying import CopyEngine, Lane, Ticket
from engine_cache.types import IndexArray
from kv_events.errors import InvalidValueError

Side: TypeAlias = Literal["host_indices", "device_indices"]
"""The field of a `PoolTransfer` that holds the rows a copy writes to."""


class Ack(NamedTuple):
    """An operation that was submitted to the engine."""

    ticket: Ticket
    ids: list[int]
    """The tree's ids of the operations that were merged into it."""


class HiCacheController:
    """Moves the pages of KV and of its sidecar pools.

    pools: the pool group, or the entry of KV if there is no sidecar. engine: not shared with other controllers.
    transfer_layer_num: layers of the model; defaults to those of the KV pool. Raises InvalidValueError if the host pool
    is not larger than the device pool, or if a layer of the model or of a pool is not mapped.

    Methods belong to the tree's thread unless they state otherwise.
    """

    def __init__(
        self, pools: PoolEntry | HostPoolGroup, engine: CopyEngine, *, transfer_layer_num: int | None = None
    ) -> None:
        self.group = group = pools if isinstance(pools, HostPoolGroup) else HostPoolGroup.of(pools)
        self.kv = group.anchor
        self.engine = engine
        require_larger_than_device(self.kv.host_pool.size, self.kv.device_allocator.size)
        self.transfer_layer_num = self.kv.host_pool.layer_num if transfer_layer_num is None else transfer_layer_num
        group.check_layers(self.transfer_layer_num)
        self._next_consumer = 0
        self._forget()

    def _forget(self) -> None:
        self._first_consumer = self._next_consumer  # loads with smaller numbers were abandoned in a reset
        self._writes: deque[Ack] = deque()
        self._load_queue: list[tuple[int, list[PoolTransfer]]] = []  # id and transfers of each load
        self._loads: deque[Ack] = deque()
        self._load_tickets: dict[int, Ticket] = {}

    def reset(self) -> None:
        """Wait for running copies, drop queued ones and free all host pages."""
        self.engine.drain()
        self._forget()
        self.group.clear()

    def write(
        self, device_indices: IndexArray, ack_id: int, extra_pools: Sequence[PoolTransfer] = ()
    ) -> IndexArray | None:
        """Start a backup and return its host rows, or None, with nothing allocated, if a pool has no room.

        The rows hold the data once `ack_id` is among the finished writes. extra_pools: transfers of sidecars, which
        receive host rows if they have none. Raises InvalidValueError for a transfer of an unknown pool, without source
        rows, or with different numbers of rows on the two sides.
        """
        kv = PoolTransfer(PoolName.KV, device_indices=device_indices)
        transfers = [kv, *extra_pools]
        taken = self._allocate_rows(transfers, "host_indices")
        if taken is None:
            return None
        try:
            ticket = self.engine.submit(Lane.WRITE, [partial(self._copy_to_host, self._moves(transfers))])
        except BaseException:
            self._give_back(taken, "host_indices")
            raise
        self._writes.append(Ack(ticket, [ack_id]))
        return kv.host_indices

    def _copy_to_host(self, moves: list[_Move]) -> None:
        for name, host, device in moves:
            entry = self.group.entries[name]
            entry.host_pool.backup_from_device_all_layer(entry.device_pool, host, device)

    def finished_writes(self, *, wait: bool = False, wait_for: int | None = None) -> list[Ack]:
        """Return finished backups in the order they were started, up to the first unfinished one; each only once.

        wait: wait for all of them. wait_for: wait for those up to the one with this `ack_id`.
        """
        for ack in self._writes if wait or wait_for is not None else ():
            ack.ticket.synchronize()
            if wait_for in ack.ids:
                break
        return [self._writes.popleft() for _ in range(_num_finished(self._writes))]

    def load(
        self, host_indices: IndexArray, ack_id: int, extra_pools: Sequence[PoolTransfer] = ()
    ) -> IndexArray | None:
        """Queue a load for `start_loading`. Return its device rows, or None, with nothing allocated, if a pool has no
        room.

        Raises TransferError after a failed load, and the errors of `write`.
        """
        self.require_loads()
        kv = PoolTransfer(PoolName.KV, host_indices=host_indices)
        transfers = [kv, *extra_pools]
        if self._allocate_rows(transfers, "device_indices") is None:
            return None
        self._load_queue.append((ack_id, transfers))
        return kv.device_indices

    def start_loading(self) -> int:
        """Start the queued loads as one operation, layer by layer. Return its number for `wait_for_layer`, or -1."""
        if not self._load_queue:
            return -1
        moves = self._moves([transfer for _, transfers in self._load_queue for transfer in transfers])
        steps = [partial(self._copy_to_device, layer, moves) for layer in range(self.transfer_layer_num)]
        ticket = self.engine.submit(Lane.LOAD, steps)
        self._loads.append(Ack(ticket, [ack_id for ack_id, _ in self._load_queue]))
        self._load_queue = []
        consumer, self._next_consumer = self._next_consumer, self._next_consumer + 1
        self._load_tickets[consumer] = ticket
        return consumer

    def _copy_to_device(self, layer: int, moves: list[_Move]) -> None:
        for name, host, device in moves:
            entry = self.group.entries[name]
            local = entry.local_layer(layer)
            if local is not None:
                entry.host_pool.load_to_device_per_layer(entry.device_pool, host, device, local)

    def wait_for_layer(self, consumer: int, layer: int) -> None:
        """Wait until a layer of the operation that `start_loading` numbered `consumer` is on the device; -1 returns at
        once. Any thread. Raises TransferError if the copy failed or a reset dropped it, and InvalidValueError for
        an unknown number.
        """
        if not -1 <= consumer < self._next_consumer:
            raise InvalidValueError("consumer", consumer, f"-1 .. {self._next_consumer - 1}, a result of start_loading")
        if 0 <= consumer < self._first_consumer:
            raise TransferError(f"load {consumer} was dropped in a reset")
        ticket = self._load_tickets.get(consumer)
        if ticket is not None:  # otherwise it is acknowledged already
            ticket.wait_for_step(layer)

    def require_loads(self) -> None:
        """Raise TransferError if a load has failed since the last reset: the tree's device rows are undefined then."""
        for ack in self._loads:
            if ack.ticket.error is not None:
                raise TransferError(f"load of {len(ack.ids)} nodes failed: {ack.ticket.error}") from ack.ticket.error

    def finished_loads(self) -> list[Ack]:
        """Return finished loads in the order they were started, up to the first unfinished one; each only once.

        Raises TransferError if one failed, and again at each call until a reset, because its rows may be in use.
        """
        num_finished = _num_finished(self._loads)
        self.require_loads()
        finished = [self._loads.popleft() for _ in range(num_finished)]
        ended = {id(ack.ticket) for ack in finished}
        self._load_tickets = {n: ticket for n, ticket in self._load_tickets.items() if id(ticket) not in ended}
        return finished

    def _allocate_rows(self, transfers: Sequence[PoolTransfer], side: Side) -> list[PoolTransfer] | None:
        num_rows = [self._num_rows(transfer, side) for transfer in transfers]
        taken, is_done = list[PoolTransfer](), False
        try:
            for transfer, number in zip(transfers, num_rows, strict=True):
                if getattr(transfer, side) is None:
                    entry = self.group.entry(transfer.name)
                    rows = entry.alloc_host(number) if side == "host_indices" else entry.alloc_device(number)
                    if rows is None:
                        return None
                    setattr(transfer, side, rows)
                    taken.append(transfer)
            is_done = True
        finally:
            if not is_done:
                self._give_back(taken, side)
        return taken

    def _num_rows(self, transfer: PoolTransfer, side: Side) -> int:
        name = self.group.entry(transfer.name).name.value
        given = transfer.host_indices if side == "device_indices" else transfer.device_indices
        if given is None:
            raise InvalidValueError(f"transfer of pool {name}", transfer, f"a source for its {side}")
        there = getattr(transfer, side)
        if there is not None and len(given) != len(there):
            expected = f"as many as on the other side, {len(given)}"
            raise InvalidValueError(f"{side} of pool {name}", len(there), expected)
        return len(given)

    def _give_back(self, transfers: Sequence[PoolTransfer], side: Side) -> None:
        for transfer in transfers:
            entry = self.group.entry(transfer.name)
            pool: RowAllocator = entry.host_pool if side == "host_indices" else entry.device_allocator
            pool.free(getattr(transfer, side))
            setattr(transfer, side, None)

    def _moves(self, transfers: Sequence[PoolTransfer]) -> list[_Move]:
        """Merge the rows of all transfers into one move per pool, in the order in which the pools first appear."""
        hosts: dict[PoolName, list[IndexArray]] = {}
        devices: dict[PoolName, list[IndexArray]] = {}
        for transfer in transfers:
            assert transfer.host_indices is not None
            assert transfer.device_indices is not None
            hosts.setdefault(transfer.name, []).append(transfer.host_indices)
            devices.setdefault(transfer.name, []).append(transfer.device_indices)
        moves = [_Move(name, np.concatenate(hosts[name]), np.concatenate(devices[name])) for name in hosts]
        moves[1:1] = [moves[0]._replace(name=entry.name) for entry in self.group.sharing]  # KV is the first
        return [move for move in moves if len(move.host)]


HybridCacheController = HiCacheController
"""The name of the controller for models with sidecar pools."""


class _Move(NamedTuple):
    name: PoolName
    host: IndexArray
    device: IndexArray


def _num_finished(acks: deque[Ack]) -> int:
    return sum(1 for _ in takewhile(lambda ack: ack.ticket.query(), acks))
