"""One kind of state in a radix tree: where a match may end for it, and how its data follow the nodes.

`TreeComponent` is what a match asks of every kind. All kinds but Full are auxiliary: their data on a tier can be used
only beside Full KV on that tier. They come and leave with it, and may leave before it, which is not an event.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

from engine_cache.base import InsertParams, MatchResult, Request
from engine_cache.components.match import MatchedPath, MatchValidator
from engine_cache.pools.allocators import PagedTokenToKVPoolAllocator
from engine_cache.pools.entry import PoolEntry
from engine_cache.storage.base import PoolName, PoolTransfer
from engine_cache.storage.operations import PrefetchOperation
from engine_cache.tree.events import ALL_PAGES, EventRecorder
from engine_cache.tree.lru import LruList
from engine_cache.tree.node import ComponentData, ComponentType, TreeNode
from engine_cache.tree.tree import RadixTree
from engine_cache.types import IndexArray
from kv_events.schema import StorageMedium

LockTicket: TypeAlias = int
"""What a component needs to release a lock."""


class TreeComponent(ABC):
    """One kind of state. `attach` makes it part of one tree, for good."""

    kind: ClassVar[ComponentType]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "match_device_only" not in inspect.signature(cls.create_match_validator).parameters:
            raise TypeError(f"{cls.__name__}.create_match_validator must take match_device_only")

    @abstractmethod
    def create_match_validator(self, match_device_only: bool = False) -> MatchValidator:
        """A new closure for one match. It is called with every node of the path, root side first, and returns whether
        a match may end there. match_device_only: ignore data on the host."""


class AuxiliaryComponent(TreeComponent):
    """A kind whose data lie beside Full KV.

    Each tier has a list of nodes in order of use: nodes with data on the device, and nodes whose data may be evicted
    from the host.
    """

    pool: ClassVar[PoolName]
    eviction_priority: ClassVar[int]
    """A node that loses its data of this kind, but stays, also loses those of kinds with this priority or a lower
    one."""
    event_group: str
    """Name of the kind in group events; see `kv_events.streams`."""
    pages_told: ClassVar[slice] = ALL_PAGES
    """The pages of a node that group events name when its data of this kind come or leave."""
    builds_on_start_node: ClassVar[bool] = False
    """Whether prefetched data may be usable only together with data that the start node of the prefetch has."""
    lists_host_copies: bool = False
    """Whether host data may be evicted while the node has device data as well."""

    tree: RadixTree
    events: EventRecorder
    entry: PoolEntry
    """The pools of this kind. Only with a host tier."""

    def attach(self, tree: RadixTree, events: EventRecorder) -> None:
        """Join a tree that holds nothing yet."""
        self.tree = tree
        self.events = events
        self.clear()
        tree.observe(self)

    def clear(self) -> None:
        """Forget every node."""
        device_kind = 2 * (self.kind - 1)
        self.device_lru_list = LruList(device_kind)
        self.host_lru_list = LruList(device_kind + 1)
        self.evictable_size = 0
        """Device rows in unlocked nodes."""
        self.protected_size = 0
        """Device rows in locked nodes."""

    @property
    def device_size(self) -> int:
        """Device rows in the tree."""
        return self.evictable_size + self.protected_size

    def data(self, node: TreeNode) -> ComponentData:
        return node.auxiliary(self.kind)

    @property
    @abstractmethod
    def device_allocator(self) -> PagedTokenToKVPoolAllocator:
        """Owner of the device rows of this kind."""

    def finalize_match_result(self, result: MatchResult, path: MatchedPath) -> MatchResult:
        """The result with what a load-back would bring of this kind."""
        return result

    # --- where data are ---------------------------------------------------------------------------------------------

    def put_on_device(self, node: TreeNode, rows: IndexArray) -> None:
        """Give a tombstone device rows, which belong to the tree from now on."""
        data = self.data(node)
        assert data.value is None
        data.value = rows
        self.device_lru_list.append(node)
        self.update_host_list(node)
        if data.lock_ref:
            self.protected_size += len(rows)
        else:
            self.evictable_size += len(rows)
        self.events.group_store(self.event_group, node, StorageMedium.GPU, self.pages_told)

    def free_on_device(self, node: TreeNode) -> None:
        """Free the device rows of a node, if it has any. They must not be locked."""
        data = self.data(node)
        if data.value is None:
            return
        assert data.lock_ref == 0, f"node {node.id} loses {self.kind.name} rows that are locked"
        self._free_device_rows(node, data.value)
        self.evictable_size -= len(data.value)
        data.value = None
        self.device_lru_list.remove(node)
        self.update_host_list(node)
        self.events.group_remove(self.event_group, node, StorageMedium.GPU, self.pages_told)

    @abstractmethod
    def _free_device_rows(self, node: TreeNode, rows: IndexArray) -> None:
        """Return the rows to their allocator. The node still has its Full rows."""

    def put_on_host(self, node: TreeNode, rows: IndexArray) -> None:
        """Give a node without data on the host host rows. `record_on_host` reports that they are filled."""
        data = self.data(node)
        assert data.host_value is None
        data.host_value = rows
        self.update_host_list(node)

    def take_from_host(self, node: TreeNode) -> IndexArray | None:
        """Take the host rows off a node, which belong to the caller from now on."""
        data = self.data(node)
        rows, data.host_value = data.host_value, None
        self.update_host_list(node)
        return rows

    def free_on_host(self, node: TreeNode) -> None:
        """Free the host rows of a node, if it has any. No backup may be filling them."""
        rows = self.take_from_host(node)
        if rows is not None:
            self.entry.host_pool.free(rows)
            self.events.group_remove(self.event_group, node, StorageMedium.CPU, self.pages_told)

    def record_on_host(self, node: TreeNode) -> None:
        """Record that the host rows of the node, if it has any, are filled."""
        if self.data(node).host_value is not None:
            self.events.group_store(self.event_group, node, StorageMedium.CPU, self.pages_told)

    def is_on_host_list(self, node: TreeNode) -> bool:
        """Whether the node belongs to `host_lru_list`."""
        data = self.data(node)
        is_free = data.host_value is not None and data.host_lock_ref == 0
        return is_free and (data.value is None or self.lists_host_copies)

    def update_host_list(self, node: TreeNode) -> None:
        """The node has changed in what decides whether it belongs to `host_lru_list`."""
        is_listed = node in self.host_lru_list
        if self.is_on_host_list(node):
            if not is_listed:
                self.host_lru_list.append(node)
        elif is_listed:
            self.host_lru_list.remove(node)

    def touched(self, path: Sequence[TreeNode]) -> None:
        """The nodes, parents first, have been used."""
        for listed in (self.device_lru_list, self.host_lru_list):
            if len(listed):
                for node in path:
                    if node in listed:
                        listed.move_to_newest(node)

    def touched_on_insert(self, node: TreeNode) -> None:
        """An insert passes the node on its way down."""
        self.touched([node])

    # --- locks ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def acquire(self, node: TreeNode) -> LockTicket | None:
        """Lock the device data that a user of the node needs. None: there are none, nothing is locked."""

    @abstractmethod
    def release(self, node: TreeNode, ticket: LockTicket) -> None:
        """Undo one `acquire` of the node."""

    @abstractmethod
    def acquire_host(self, node: TreeNode) -> LockTicket | None:
        """Lock the host data that a user of the node needs. None: there are none, nothing is locked."""

    @abstractmethod
    def release_host(self, node: TreeNode, ticket: LockTicket) -> None:
        """Undo one `acquire_host` of the node."""

    def lock(self, node: TreeNode) -> None:
        """Lock the device data of one node."""
        data = self.data(node)
        data.lock_ref += 1
        if data.lock_ref == 1 and data.value is not None:
            self.evictable_size -= len(data.value)
            self.protected_size += len(data.value)

    def unlock(self, node: TreeNode) -> None:
        """Undo one `lock` of the node."""
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
        """Undo one `lock_host` of the node."""
        data = self.data(node)
        assert data.host_lock_ref > 0, f"node {node.id} unlocked with host_lock_ref 0 of {self.kind.name}"
        data.host_lock_ref -= 1
        self.update_host_list(node)

    # --- what the tree does -----------------------------------------------------------------------------------------

    @abstractmethod
    def was_split(self, upper: TreeNode, lower: TreeNode, split_len: int) -> None:
        """`lower` has lost its first `split_len` units to `upper`, which is new."""

    def check_insert(self, params: InsertParams) -> None:
        """Raise InvalidValueError for an insert that lacks what this kind needs. Nothing has changed yet."""

    def should_skip_leaf_creation(self, end: int, params: InsertParams) -> bool:
        """Whether a leaf that ends after `end` units of the key could not be used."""
        return False

    def update_on_overlap(self, node: TreeNode, start: int, rows: IndexArray, params: InsertParams) -> None:
        """A node on the device is inserted again. rows: the caller's, one a unit of the node; their Full rows are freed
        afterwards. start: units of the key before the node."""

    def recover_after_unevict(self, node: TreeNode, start: int, params: InsertParams) -> None:
        """The node has taken the caller's Full rows, as a new leaf or because its own had been evicted."""

    def finish_insert(self, end: TreeNode, params: InsertParams) -> bool:
        """The key ends at this node. False: the tree did not take all that `params` offers."""
        return True

    # --- transfers --------------------------------------------------------------------------------------------------

    @abstractmethod
    def needed_nodes(self, node: TreeNode) -> list[TreeNode]:
        """The nodes whose data a match that ends at the node needs."""

    @abstractmethod
    def load_transfers(self, node: TreeNode, req: Request | None) -> list[PoolTransfer]:
        """What must come from the host, `nodes_to_load` included, so that a match on the device may end at the node."""

    @abstractmethod
    def commit_load(self, ack_id: int, node: TreeNode, transfers: list[PoolTransfer], req: Request | None) -> None:
        """The load `ack_id` of the node has device rows, those of Full included."""

    def end_load(self, ack_id: int, node: TreeNode) -> None:
        """The load has ended. The node is still locked."""

    @abstractmethod
    def archive_transfer(self, node: TreeNode, keys: list[str]) -> PoolTransfer:
        """The node's host rows and their names in the store. keys: one a page of the node."""

    @abstractmethod
    def prefetch_transfer(self, start_node: TreeNode, num_pages: int) -> PoolTransfer | None:
        """What to fetch along with so many pages below the start node, still without host rows: as many pages of this
        kind as it has keys. None: the fetched pages could not be matched."""

    @abstractmethod
    def commit_prefetch(self, end: TreeNode, fetched: PoolTransfer, operation: PrefetchOperation) -> None:
        """Give the rows that were read to the nodes above `end`, where the fetched prefix ends, and free the others."""
