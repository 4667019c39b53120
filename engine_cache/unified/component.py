"""What one kind of state does in a unified tree: where a match may end for it, and how its data move with the nodes.

`TreeComponent` is what the match asks of every kind, Full included. All other kinds are auxiliary: their data on a tier
are of use only beside Full KV on that tier, come and go with it, and may go before it, which is no event.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from engine_cache.base import InsertParams, MatchPrefixParams, MatchResult, Request
from engine_cache.pool_entry import PoolEntry
from engine_cache.pools.allocators import PagedTokenToKVPoolAllocator
from engine_cache.storage.base import PoolName, PoolTransfer
from engine_cache.storage_operations import PrefetchOperation
from engine_cache.tree.lru import LruList
from engine_cache.tree.node import TreeNode
from engine_cache.types import IndexArray
from engine_cache.unified.match import MatchedPath, MatchValidator
from engine_cache.unified.node import ComponentData, ComponentType, UnifiedNode, device_list, host_list, unified
from kv_events.schema import StorageMedium

if TYPE_CHECKING:
    from engine_cache.unified.cache import UnifiedRadixCache

LockTicket: TypeAlias = int
"""What a component must be told to take a lock back."""


class TreeComponent(ABC):
    """One kind of state. `attach` makes it part of a tree; it belongs to one tree only."""

    kind: ClassVar[ComponentType]
    tree: UnifiedRadixCache

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "match_device_only" not in inspect.signature(cls.create_match_validator).parameters:
            raise TypeError(f"{cls.__name__}.create_match_validator must take match_device_only")

    def attach(self, tree: UnifiedRadixCache) -> None:
        self.tree = tree

    @abstractmethod
    def create_match_validator(self, match_device_only: bool = False) -> MatchValidator:
        """A fresh closure that is shown the nodes of one match from the root down, each once and none left out, and
        says of each whether a match may end there. match_device_only: data on the host do not count."""

    def finalize_match_result(self, result: MatchResult, path: MatchedPath, params: MatchPrefixParams) -> MatchResult:
        """The result with what this kind has to say about it."""
        return result


class AuxiliaryComponent(TreeComponent):
    """A kind whose data lie beside Full KV.

    Each tier has a list of nodes in order of use: those with data on the device, and those with data on the host only
    that nobody holds.
    """

    pool: ClassVar[PoolName]
    eviction_priority: ClassVar[int]
    """Kinds of this priority or a lower one go along when a node that stays loses its data of this kind."""
    event_group: str
    """Its name in group events; see `kv_events.streams`."""
    pages_told: ClassVar[slice] = slice(None)
    """Which pages of a node group events name when it gets or loses data of this kind."""
    builds_on_anchor: ClassVar[bool] = False
    """Whether what a prefetch brings may be of use only beside what its anchor has."""

    def reset(self) -> None:
        """Forget every node."""
        self.device_lru_list = LruList[UnifiedNode](device_list(self.kind))
        self.host_lru_list = LruList[UnifiedNode](host_list(self.kind))
        self.evictable_size = 0
        """Device rows in unlocked nodes."""
        self.protected_size = 0
        """Device rows in locked nodes."""

    @property
    def device_size(self) -> int:
        """Device rows in the tree."""
        return self.evictable_size + self.protected_size

    def data(self, node: TreeNode) -> ComponentData:
        return unified(node).auxiliary(self.kind)

    @property
    @abstractmethod
    def device_allocator(self) -> PagedTokenToKVPoolAllocator:
        """Owner of the device rows of this kind."""

    @property
    def entry(self) -> PoolEntry:
        """The pools of this kind; for trees with a host tier."""
        return self.tree.controller.entry(self.pool)

    # --- where data are ---------------------------------------------------------------------------------------------

    def put_on_device(self, node: UnifiedNode, rows: IndexArray) -> None:
        """A tombstone gets device rows, which are the tree's from now on."""
        data = self.data(node)
        assert data.value is None
        data.value = rows
        if node in self.host_lru_list:
            self.host_lru_list.remove(node)
        self.device_lru_list.append(node)
        self.evictable_size += len(rows)
        self.tree._record_group_store(self.event_group, node, StorageMedium.GPU, self.pages_told)

    def free_on_device(self, node: UnifiedNode) -> None:
        """Free the device rows of a node that is not locked, if it has any."""
        data = self.data(node)
        if data.value is None:
            return
        assert data.lock_ref == 0, f"node {node.id} loses {self.kind.name} rows that are locked"
        self._free_device_rows(node, data.value)
        self.evictable_size -= len(data.value)
        data.value = None
        self.device_lru_list.remove(node)
        self._list_on_host(node)
        self.tree._record_group_remove(self.event_group, node, StorageMedium.GPU, self.pages_told)

    @abstractmethod
    def _free_device_rows(self, node: UnifiedNode, rows: IndexArray) -> None:
        """Give the rows back. The node's Full rows are still there."""

    def put_on_host(self, node: UnifiedNode, rows: IndexArray) -> None:
        """A node without data on the host gets host rows; `tell_of_host` says when they are filled."""
        data = self.data(node)
        assert data.host_value is None
        data.host_value = rows
        self._list_on_host(node)

    def take_from_host(self, node: UnifiedNode) -> IndexArray | None:
        """The host rows of a node, which are the caller's now."""
        data = self.data(node)
        rows, data.host_value = data.host_value, None
        if node in self.host_lru_list:
            self.host_lru_list.remove(node)
        return rows

    def free_on_host(self, node: UnifiedNode) -> None:
        """Free the host rows of a node, if it has any; no backup is on its way to them."""
        rows = self.take_from_host(node)
        if rows is not None:
            self.entry.host_pool.free(rows)
            self.tree._record_group_remove(self.event_group, node, StorageMedium.CPU, self.pages_told)

    def tell_of_host(self, node: UnifiedNode) -> None:
        """The host rows of the node, if it has any, are filled now."""
        if self.data(node).host_value is not None:
            self.tree._record_group_store(self.event_group, node, StorageMedium.CPU, self.pages_told)

    def _list_on_host(self, node: UnifiedNode) -> None:
        data = self.data(node)
        is_host_only = data.value is None and data.host_value is not None
        if is_host_only and data.host_lock_ref == 0 and node not in self.host_lru_list:
            self.host_lru_list.append(node)

    def touch(self, path: Sequence[UnifiedNode]) -> None:
        """The nodes, root side first, have been used now."""
        for node in path:
            for listed in (self.device_lru_list, self.host_lru_list):
                if node in listed:
                    listed.move_to_newest(node)

    def touch_on_insert(self, node: UnifiedNode) -> None:
        """An insert passes the node."""
        self.touch([node])

    # --- locks ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def acquire(self, node: UnifiedNode) -> LockTicket | None:
        """Forbid eviction of the device data that a user of the node needs; None: it has none, nothing is locked."""

    @abstractmethod
    def release(self, node: UnifiedNode, ticket: LockTicket) -> None:
        """Take one `acquire` of this very node back."""

    @abstractmethod
    def acquire_host(self, node: UnifiedNode) -> LockTicket | None:
        """The same for its host data."""

    @abstractmethod
    def release_host(self, node: UnifiedNode, ticket: LockTicket) -> None:
        """Take one `acquire_host` of this very node back."""

    def lock(self, node: UnifiedNode) -> None:
        """One node with device data."""
        data = self.data(node)
        assert data.value is not None
        data.lock_ref += 1
        if data.lock_ref == 1:
            self.evictable_size -= len(data.value)
            self.protected_size += len(data.value)

    def unlock(self, node: UnifiedNode) -> None:
        data = self.data(node)
        assert data.value is not None
        assert data.lock_ref > 0, f"node {node.id} unlocked with lock_ref 0 of {self.kind.name}"
        data.lock_ref -= 1
        if data.lock_ref == 0:
            self.evictable_size += len(data.value)
            self.protected_size -= len(data.value)

    def lock_host(self, node: UnifiedNode) -> None:
        """One node with host data."""
        self.data(node).host_lock_ref += 1
        if node in self.host_lru_list:
            self.host_lru_list.remove(node)

    def unlock_host(self, node: UnifiedNode) -> None:
        data = self.data(node)
        assert data.host_lock_ref > 0, f"node {node.id} unlocked with host_lock_ref 0 of {self.kind.name}"
        data.host_lock_ref -= 1
        self._list_on_host(node)

    # --- what the tree does -----------------------------------------------------------------------------------------

    @abstractmethod
    def redistribute_on_split(self, upper: UnifiedNode, lower: UnifiedNode, split_len: int) -> None:
        """`lower` has lost its first `split_len` units to `upper`, which is new."""

    def check_insert(self, params: InsertParams) -> None:
        """Raises InvalidValueError for an insert that lacks what this kind needs. Nothing has changed yet."""

    def should_skip_leaf_creation(self, end: int, params: InsertParams) -> bool:
        """Whether a leaf that ends after `end` units of the key would be of no use."""
        return False

    def update_on_overlap(self, node: UnifiedNode, start: int, rows: IndexArray, params: InsertParams) -> None:
        """A node on the device is inserted once more. rows: the caller's, one a unit of the node, of which the Full
        rows are freed afterwards; `start`: units of the key before the node."""

    def recover_after_unevict(self, node: UnifiedNode, start: int, params: InsertParams) -> None:
        """The node has taken the caller's Full rows, as a new leaf or because its own had been evicted."""

    def finish_insert(self, end: UnifiedNode, params: InsertParams) -> bool:
        """The key ends at this node. False: something in `params` was left to the caller."""
        return True

    # --- transfers --------------------------------------------------------------------------------------------------

    @abstractmethod
    def needed_nodes(self, node: UnifiedNode) -> list[UnifiedNode]:
        """The nodes whose data a match that ends at the node needs."""

    @abstractmethod
    def load_transfers(self, node: UnifiedNode, req: Request | None) -> list[PoolTransfer]:
        """What must come from the host, `nodes_to_load` included, so that a match may end at the node on the device."""

    @abstractmethod
    def commit_load(self, node: UnifiedNode, transfers: list[PoolTransfer], req: Request | None) -> None:
        """Device rows are assigned, Full's too."""

    def prepare_load(self, node: UnifiedNode, req: Request) -> None:
        """The request wants to go on from a node that is to be loaded as far as it must. Raises as `refuse_load`."""

    def refuse_load(self, anchor: TreeNode, req: Request) -> None:
        """The request goes on from `anchor`, not from the best match. Raises PoolExhaustedError without room for what
        it needs of its own there."""

    @abstractmethod
    def archive_transfer(self, node: UnifiedNode, keys: list[str]) -> PoolTransfer:
        """How the node's host rows are named in the store. keys: one a page of the node."""

    @abstractmethod
    def prefetch_transfer(self, anchor: UnifiedNode, num_pages: int) -> PoolTransfer | None:
        """What to fetch along with so many pages behind the anchor: as many pages of this kind as there are keys, which
        say no more than that; still without host rows. None: nothing that could be matched would come of it."""

    @abstractmethod
    def commit_prefetch(self, end: UnifiedNode, fetched: PoolTransfer, operation: PrefetchOperation) -> None:
        """Put rows that were really read behind the node at which the fetched prefix ends, and free the others."""
