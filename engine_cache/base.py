"""The interface of a prefix cache, with its parameters and results, as an engine's scheduler uses it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine_cache.tree.key import RadixKey
from engine_cache.tree.node import TreeNode
from engine_cache.types import IndexArray, no_indices
from kv_events.schema import EngineEvent


class MatchPrefixParams(NamedTuple):
    key: RadixKey
    cow_mamba: bool = False
    """Return the state that the request must copy before it continues, and allocate its own slot for the copy."""
    req: Request | None = None
    """Required with `cow_mamba`."""


class MatchResult(NamedTuple):
    """The longest cached prefix. In a cache with one tier, all three nodes are the same."""

    device_indices: IndexArray
    """Device rows of the prefix up to `last_device_node`. The copy belongs to the caller."""
    last_device_node: TreeNode
    """Node to lock while the rows are in use."""
    last_host_node: TreeNode
    """Deepest node with a host copy: the start node of a prefetch."""
    best_match_node: TreeNode
    """Deepest node of the prefix on any tier: the end of a load-back."""
    host_hit_length: int = 0
    """Units that a load-back would add to `device_indices`."""
    mamba_branching_seqlen: int | None = None
    """A length, in whole chunks, at which a state would be useful. Set if KV continues beyond the last state."""
    mamba_host_hit_length: int = 0
    """Recurrent states that a load-back would copy to the device, 0 or 1."""
    swa_host_hit_length: int = 0
    """Units of the sliding window that a load-back would copy to the device."""


class InsertParams(NamedTuple):
    key: RadixKey
    value: IndexArray | None = None
    """Device rows, one for each unit of the key. If None, the tokens serve as rows, which is useful only in tests."""
    chunked: bool = False
    """Whether the prompt is still being computed, in which case hit counts do not increase."""
    priority: int = 0
    mamba_value: IndexArray | None = None
    """[1] slot of the recurrent state after the last unit of the key. Required by Mamba caches, unused by others."""
    prev_prefix_len: int = 0
    """Leading rows of `value` that belong to the tree. Mamba caches free the duplicates after them themselves."""
    swa_evicted_seqlen: int = 0
    """Leading rows of `value` whose sliding-window rows were freed before, in whole pages."""


class InsertResult(NamedTuple):
    prefix_len: int
    """Units that were in the tree before. Their rows in `value` are duplicates, which the caller frees."""
    total_len: int = 0
    """Units of the key that are in the tree now."""
    mamba_exist: bool = False
    """Whether the tree has not accepted `mamba_value`, in which case its slot still belongs to the caller."""


class EvictParams(NamedTuple):
    num_tokens: int
    mamba_num: int = 0
    """Recurrent states to free in addition."""
    swa_num_tokens: int = 0
    """Units of sliding-window rows to free in addition."""


class EvictResult(NamedTuple):
    num_tokens_evicted: int
    """Units freed: more than requested if the last node was longer, fewer if nothing was left."""
    mamba_num_evicted: int = 0
    """Recurrent states freed, including those of evicted nodes."""
    swa_num_tokens_evicted: int = 0
    """Units of sliding-window rows freed, including those of evicted nodes."""


class InitLoadBackParams(NamedTuple):
    best_match_node: TreeNode
    """The value from the match."""
    host_hit_length: int
    mem_quota: int | None = None
    """Device units that the request may use. None: no limit."""
    req: Request | None = None


class DecLockRefParams(NamedTuple):
    """Description of the lock to release, for caches with several kinds of state."""

    tickets: tuple[tuple[int, int], ...] = ()
    """(kind of state, ticket of its component) for each kind that is locked in addition to KV."""


class IncLockRefResult(NamedTuple):
    delta: int
    """Change of the evictable size: minus the units that became protected."""
    node: TreeNode
    """The locked node, which must be unlocked: for a node that is not on the device, its nearest ancestor that is."""
    tickets: tuple[tuple[int, int], ...] = ()
    """As in `DecLockRefParams`."""

    def to_dec_params(self) -> DecLockRefParams:
        """Return the parameters that release exactly this lock."""
        return DecLockRefParams(self.tickets)


class DecLockRefResult(NamedTuple):
    delta: int
    """Change of the evictable size: the units that became evictable."""


@dataclass(slots=True, eq=False)
class Request:
    """The state of a running request that a cache reads and updates."""

    rid: str
    token_ids: Sequence[int] | npt.NDArray[np.integer]
    """Tokens of prompt and output whose KV has been computed. Line `req_pool_idx` holds a pool row for each."""
    req_pool_idx: int
    """Line in the `ReqToTokenPool`."""
    extra_key: str | None = None
    priority: int = 0
    last_node: TreeNode | None = None
    """Node whose path is locked by the request."""
    cache_protected_len: int = 0
    """Number of leading rows that belong to the tree, page-aligned. The rows after them belong to the request."""
    prefix_indices: IndexArray = field(default_factory=no_indices)
    """Rows of all tokens computed so far."""
    mamba_pool_idx: IndexArray | None = None
    """[1] slot of the running recurrent state, which belongs to the request."""
    mamba_cow_src_index: IndexArray | None = None
    """[1] slot of the tree that the request must copy to `mamba_pool_idx` while `last_node` is locked."""
    mamba_last_track_seqlen: int | None = None
    """Number of tokens up to the state in `mamba_track_idx`, whole pages. None: no state since the last call."""
    mamba_track_idx: IndexArray | None = None
    """[1] slot of the tracked state, which belongs to the request. Required by a cache with an extra buffer."""
    lock_params: DecLockRefParams | None = None
    """Parameters of the lock on `last_node`. Required by a cache with several kinds of state."""
    swa_evicted_seqlen: int = 0
    """Leading tokens whose sliding-window rows the engine has freed, in whole pages."""
    swa_host_hit_length: int = 0
    """The value from the match, like the next field."""
    mamba_host_hit_length: int = 0


class BasePrefixCache(ABC):
    """Keeps pages of earlier prompts for later ones. Belongs to one thread.

    A cache without a host tier never waits. A cache with a host tier waits for copies to the host in four cases: in an
    eviction with write-back, when prefetched pages are inserted below a node whose backup is in progress, when a
    storage backend is detached, and in `reset`.

    The tree owns the device rows of its pages and frees them when it evicts. It keeps only whole pages: keys are cut to
    whole pages first, and a key without a whole page gives the empty result and changes nothing.
    """

    @abstractmethod
    def reset(self) -> None:
        """Drop everything. Does not free the rows: the owner clears the pools."""

    @abstractmethod
    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Return the longest prefix, on any tier, at whose end every kind of state has the data it needs.

        Refreshes the access times of its nodes. May split a node at its end. With `cow_mamba`, raises
        PoolExhaustedError if the request has no state slot and none can be freed for it.
        """

    @abstractmethod
    def insert(self, params: InsertParams) -> InsertResult:
        """Insert a key. The tree becomes the owner of the rows of pages that are not on the device yet, and of the
        other data in `params` that it can use.

        Raises InvalidValueError if `value` does not have a row for each unit, if data of a kind of state is missing, or
        if the cache has recurrent states and the key does not consist of whole pages.
        """

    @abstractmethod
    def evict(self, params: EvictParams) -> EvictResult:
        """Free at least the requested amounts, in whole nodes, if unlocked nodes hold as much.

        The counts in the result include data that is freed together with a node.
        """

    @abstractmethod
    def inc_lock_ref(self, node: TreeNode) -> IncLockRefResult:
        """Protect from eviction the KV of the node and its ancestors, and the states needed to continue from the node.

        Raises CacheStateError for a node of another tree.
        """

    @abstractmethod
    def dec_lock_ref(self, node: TreeNode, params: DecLockRefParams | None = None) -> DecLockRefResult:
        """Undo one `inc_lock_ref`. node, params: `node` and `to_dec_params()` of its result. A cache with one kind of
        lock needs no params.

        Raises CacheStateError if the node is not locked or belongs to another tree, and InvalidValueError if required
        params are missing.
        """

    @abstractmethod
    def cache_unfinished_req(self, req: Request, *, chunked: bool = False) -> None:
        """Insert the whole pages that a running request has computed, and update its line and its lock."""

    @abstractmethod
    def cache_finished_req(self, req: Request, *, is_insert: bool = True) -> None:
        """End a request: insert or free its whole pages, free its other rows, and release its lock.

        The caller frees its line in the `ReqToTokenPool`.
        """

    @abstractmethod
    def evictable_size(self) -> int:
        """Return the units on the device that eviction could free."""

    @abstractmethod
    def protected_size(self) -> int:
        """Return the units on the device that are protected by locks."""

    def take_events(self) -> list[EngineEvent]:
        """Return all events since the last call, oldest first. Empty if the cache records no events."""
        return []
