"""One kind of state in a radix tree: where a match can end for it, and how its data is kept at the nodes.

Every node consists of Full KV. `TreeComponent` contains what a match requires of any other kind. These are auxiliary:
their data on a tier can be used only together with Full KV on the same tier. Auxiliary data is added and removed
together with Full KV. It can also be removed earlier, which is not an event.
"""

import inspect
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, ClassVar, NamedTuple, TypeAlias

from engine_cache.base import InsertParams, MatchResult, Request
from engine_cache.pools.allocators import PagedTokenToKVPoolAllocator
from engine_cache.pools.entry import PoolEntry
from engine_cache.storage.base import PoolName, PoolTransfer
from engine_cache.storage.operations import PrefetchOperation
from engine_cache.tree.events import ALL_PAGES, EventRecorder
from engine_cache.tree.node import ComponentData, ComponentType, TreeNode
from engine_cache.tree.tree import RadixTree
from engine_cache.types import IndexArray
from kv_events.schema import StorageMedium

MatchValidator: TypeAlias = Callable[[TreeNode], bool]
LockTicket: TypeAlias = int
"""The value with which a component releases a lock."""
LruOrder: TypeAlias = OrderedDict[TreeNode, None]
"""Nodes in order of use, least recently used first."""

_EVICTION_BATCH = 64


class MatchedPath(NamedTuple):
    """The nodes that a key shares with the tree, and how much of that path each kind of state can use.

    root ── A ── B ── C ── D'       D': KV on the host only
            ok   ok   ok   ok       any tier: the best match is D
            ok   ok   gap  -        device only: B, from where a request can continue without a load
    """

    nodes: list[TreeNode]
    """Root side first. Every node is on at least one tier."""
    num_best: int
    """Number of leading nodes up to the best match."""
    num_device: int
    """Number of leading nodes up to the best match on the device, at most `num_best`."""


class TreeComponent(ABC):
    """One kind of state. `attach` binds it to one tree permanently."""

    kind: ClassVar[ComponentType]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "match_device_only" not in inspect.signature(cls.create_match_validator).parameters:
            raise TypeError(f"{cls.__name__}.create_match_validator must take match_device_only")

    @abstractmethod
    def create_match_validator(self, match_device_only: bool = False) -> MatchValidator:
        """Create a validator for one match.

        The validator is called with every node of the path, root side first, and returns whether a match can end there.
        match_device_only: ignore data on the host.
        """


class AuxiliaryComponent(TreeComponent):
    """A kind whose data is stored beside Full KV.

    Each tier has a list of nodes in order of use: nodes with data on the device, and nodes whose data can be evicted
    from the host.
    """

    pool: ClassVar[PoolName]
    eviction_priority: ClassVar[int]
    """A node that stays but loses data of this kind also loses data of kinds with this priority or a lower one."""
    event_group: str
    """Name of the kind in group events; see `kv_events.streams`."""
    event_pages: ClassVar[slice] = ALL_PAGES
    """The pages of a node that group events report when the node gains or loses data of this kind."""
    builds_on_start_node: ClassVar[bool] = False
    """Whether prefetched data may depend on data at the start node of the prefetch."""
    lists_host_copies: ClassVar[bool] = False
    """Whether host data can be evicted while the node has device data as well."""

    tree: RadixTree
    events: EventRecorder
    entry: PoolEntry
    """The pools of this kind. Set only with a host tier."""

    def attach(self, tree: RadixTree, events: EventRecorder) -> None:
        self.tree = tree
        self.events = events
        self._last_ticket: LockTicket = 0
        self.clear()
        tree.observe(self)

    def clear(self) -> None:
        self.device_lru_list: LruOrder = OrderedDict()
        self.host_lru_list: LruOrder = OrderedDict()
        self.evictable_size = 0
        """Device rows in unlocked nodes."""
        self.protected_size = 0
        """Device rows in locked nodes."""
        self._locked: dict[LockTicket, tuple[list[TreeNode], bool]] = {}
        """The nodes that each lock covers, children first, and whether it is a lock on the host."""

    @property
    def device_size(self) -> int:
        return self.evictable_size + self.protected_size

    def data(self, node: TreeNode) -> ComponentData:
        return node.auxiliary(self.kind)

    @property
    @abstractmethod
    def device_allocator(self) -> PagedTokenToKVPoolAllocator:
        """Owner of the device rows of this kind."""

    def finalize_match_result(self, result: MatchResult, path: MatchedPath) -> MatchResult:
        """Return the result with the amount of this kind that a load-back would copy."""
        return result

    # --- data of nodes ----------------------------------------------------------------------------------------------

    def put_on_device(self, node: TreeNode, rows: IndexArray) -> None:
        """Give device rows to a tombstone. The tree owns them afterwards."""
        data = self.data(node)
        assert data.value is None
        data.value = rows
        self.device_lru_list[node] = None
        self.update_host_list(node)
        if data.lock_ref:
            self.protected_size += len(rows)
        else:
            self.evictable_size += len(rows)
        self.events.group_store(self.event_group, node, StorageMedium.GPU, self.event_pages)

    def free_on_device(self, node: TreeNode) -> None:
        """Free the device rows of a node, if it has any. They must not be locked."""
        data = self.data(node)
        if data.value is None:
            return
        assert data.lock_ref == 0, f"node {node.id} loses {self.kind.name} rows that are locked"
        self._free_device_rows(node, data.value)
        self.evictable_size -= len(data.value)
        data.value = None
        del self.device_lru_list[node]
        self.update_host_list(node)
        self.events.group_remove(self.event_group, node, StorageMedium.GPU, self.event_pages)

    @abstractmethod
    def _free_device_rows(self, node: TreeNode, rows: IndexArray) -> None:
        """Return the rows to their allocator. The node still has its Full rows."""

    def put_on_host(self, node: TreeNode, rows: IndexArray) -> None:
        """Give host rows to a node without data on the host. `record_on_host` reports when they are filled."""
        data = self.data(node)
        assert data.host_value is None
        data.host_value = rows
        self.update_host_list(node)

    def take_from_host(self, node: TreeNode) -> IndexArray | None:
        """Remove the host rows from a node and return them. The caller owns them afterwards."""
        data = self.data(node)
        rows, data.host_value = data.host_value, None
        self.update_host_list(node)
        return rows

    def free_on_host(self, node: TreeNode) -> None:
        """Free the host rows of a node, if it has any. No backup may be writing to them."""
        rows = self.take_from_host(node)
        if rows is not None:
            self.entry.host_pool.free(rows)
            self.events.group_remove(self.event_group, node, StorageMedium.CPU, self.event_pages)

    def record_on_host(self, node: TreeNode) -> None:
        """Record that the host rows of the node, if it has any, are filled."""
        if self.data(node).host_value is not None:
            self.events.group_store(self.event_group, node, StorageMedium.CPU, self.event_pages)

    def is_filled_on_host(self, node: TreeNode) -> bool:
        """Return whether the node has data on the host that no backup is still writing."""
        data = self.data(node)
        return data.host_value is not None and data.pending_id is None

    def is_on_host_list(self, node: TreeNode) -> bool:
        data = self.data(node)
        is_free = data.host_value is not None and data.host_lock_ref == 0
        return is_free and (data.value is None or self.lists_host_copies)

    def update_host_list(self, node: TreeNode) -> None:
        if self.is_on_host_list(node):
            self.host_lru_list.setdefault(node)
        else:
            self.host_lru_list.pop(node, None)

    def touched(self, path: Sequence[TreeNode]) -> None:
        for listed in (self.device_lru_list, self.host_lru_list):
            if listed:
                for node in path:
                    if node in listed:
                        listed.move_to_end(node)

    def touched_on_insert(self, node: TreeNode) -> None:
        """Mark a node as used by an insert that passes it on the way down."""
        self.touched([node])

    # --- locks ------------------------------------------------------------------------------------------------------

    def acquire(self, node: TreeNode, *, on_host: bool = False) -> LockTicket | None:
        """Lock the data, on the device or on the host, that a user of the node needs.

        Returns None, and locks nothing, without such data.
        """
        nodes = self.nodes_to_lock(node, on_host)
        if not nodes:
            return None
        lock = self.lock_host if on_host else self.lock
        for step in nodes:
            lock(step)
        self._last_ticket += 1
        self._locked[self._last_ticket] = nodes, on_host
        return self._last_ticket

    def is_locked(self, ticket: LockTicket) -> bool:
        """Whether a ticket is still to be released."""
        return ticket in self._locked

    def release(self, ticket: LockTicket) -> None:
        """Undo one `acquire`, whether or not nodes were split or received data in between."""
        nodes, on_host = self._locked.pop(ticket)
        unlock = self.unlock_host if on_host else self.unlock
        for step in nodes:
            unlock(step)

    @abstractmethod
    def nodes_to_lock(self, node: TreeNode, on_host: bool) -> list[TreeNode]:
        """Return the nodes, children first, whose data on the device or on the host a user of the node needs."""

    def lock(self, node: TreeNode) -> None:
        """Lock the device data of one node."""
        data = self.data(node)
        data.lock_ref += 1
        if data.lock_ref == 1 and data.value is not None:
            self.evictable_size -= len(data.value)
            self.protected_size += len(data.value)

    def unlock(self, node: TreeNode) -> None:
        data = self.data(node)
        assert data.lock_ref > 0, f"node {node.id} unlocked with lock_ref 0 of {self.kind.name}"
        data.lock_ref -= 1
        if data.lock_ref == 0 and data.value is not None:
            self.evictable_size += len(data.value)
            self.protected_size -= len(data.value)

    def lock_host(self, node: TreeNode) -> None:
        """Lock the host data of one node."""
        self.data(node).host_lock_ref += 1
        self.update_host_list(node)

    def unlock_host(self, node: TreeNode) -> None:
        data = self.data(node)
        assert data.host_lock_ref > 0, f"node {node.id} unlocked with host_lock_ref 0 of {self.kind.name}"
        data.host_lock_ref -= 1
        self.update_host_list(node)

    # --- changes of the tree ----------------------------------------------------------------------------------------

    @abstractmethod
    def was_split(self, upper: TreeNode, lower: TreeNode, split_len: int) -> None:
        """Handle a split: the new node `upper` has received the first `split_len` units of `lower`."""

    def check_insert(self, params: InsertParams) -> None:
        """Check an insert before it changes anything. Raises InvalidValueError if data of this kind is missing."""

    def should_skip_leaf_creation(self, end: int, params: InsertParams) -> bool:
        """Return whether a leaf that ends after `end` units of the key would be unusable."""
        return False

    def update_on_overlap(self, node: TreeNode, start: int, params: InsertParams) -> None:
        """Handle an insert over a node that is on the device.

        start: units of the key before the node. The Full rows of `params` for the node are freed afterwards.
        """

    def recover_after_unevict(self, node: TreeNode, start: int, params: InsertParams) -> None:
        """Handle a node that received Full rows from the caller: a new leaf, or a node that was evicted."""

    def finish_insert(self, end: TreeNode, params: InsertParams) -> bool:
        """Handle the last node of an insert. Returns False if the tree did not accept everything in `params`."""
        return True

    # --- transfers --------------------------------------------------------------------------------------------------

    @abstractmethod
    def needed_nodes(self, node: TreeNode) -> list[TreeNode]:
        """Return the nodes whose data is needed by a match that ends at the node."""

    @abstractmethod
    def load_transfers(self, node: TreeNode, req: Request | None) -> list[PoolTransfer]:
        """Return the transfers from the host, with `nodes_to_load`, that let a device match end at the node."""

    @abstractmethod
    def commit_load(self, ack_id: int, node: TreeNode, transfers: list[PoolTransfer], req: Request | None) -> None:
        """Handle the start of load `ack_id`: the node has its device rows, including those of Full."""

    def end_load(self, ack_id: int, node: TreeNode) -> None:
        """Handle the end of a load. The node is still locked."""

    @abstractmethod
    def archive_transfer(self, node: TreeNode, keys: list[str]) -> PoolTransfer:
        """Return the transfer of the node's host rows to the storage backend. keys: one for each page of the node."""

    @abstractmethod
    def prefetch_transfer(self, start_node: TreeNode, num_pages: int) -> PoolTransfer | None:
        """Return the transfer that accompanies a prefetch of `num_pages` pages below the start node, without host rows.

        It has one key for each page of this kind. Returns None if no match could use the fetched pages.
        """

    @abstractmethod
    def commit_prefetch(self, end: TreeNode, fetched: PoolTransfer, operation: PrefetchOperation) -> None:
        """Give the rows that were read to the last nodes of the prefix, which ends at `end`, and free the others."""


def least_recent_first(listed: LruOrder) -> Iterator[TreeNode]:
    """Yield the nodes of an LRU list. The caller may remove a node once it was yielded."""
    num_kept = 0
    while batch := list(islice(listed, num_kept, num_kept + _EVICTION_BATCH)):
        yield from batch
        num_kept += sum(node in listed for node in batch)


def num_accepted(nodes: Sequence[TreeNode], validators: Sequence[MatchValidator]) -> int:
    """Return the number of leading nodes up to the deepest one that all validators accept.

    Every validator is called with every node, even after another validator has refused it, because validators may
    count.
    """
    deepest = 0
    for position, node in enumerate(nodes, 1):
        verdicts = [accepts(node) for accepts in validators]
        if all(verdicts):
            deepest = position
    return deepest
