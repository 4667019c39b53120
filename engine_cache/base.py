"""The interface of a prefix cache: what an engine's scheduler calls, with what, and what it gets."""

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
    """Name the state that the request must copy before it goes on, and give it a slot of its own to copy it to."""
    req: Request | None = None
    """Wanted with `cow_mamba`."""


class MatchResult(NamedTuple):
    """The longest cached prefix. A cache with one tier gives one node three times."""

    device_indices: IndexArray
    """Device rows of the prefix up to `last_device_node`; the caller's own copy."""
    last_device_node: TreeNode
    """Node to lock while the rows are in use."""
    last_host_node: TreeNode
    """Deepest node with a host copy: anchor of a prefetch."""
    best_match_node: TreeNode
    """Deepest node of the prefix on any tier: anchor of a load-back."""
    host_hit_length: int = 0
    """Units that a load-back would add to `device_indices`."""
    mamba_branching_seqlen: int | None = None
    """Where KV goes on beyond the last recurrent state: a length, in whole chunks, at which a state would be of use."""
    mamba_host_hit_length: int = 0
    """Recurrent states that a load-back would bring to the device, 0 or 1."""
    swa_host_hit_length: int = 0
    """Units of the sliding window that a load-back would bring to the device."""


class InsertParams(NamedTuple):
    key: RadixKey
    value: IndexArray | None = None
    """Device rows, one a unit of the key. None: the tokens serve as rows, which only tests want."""
    chunked: bool = False
    """The prompt is still being computed: hit counts do not rise."""
    priority: int = 0
    mamba_value: IndexArray | None = None
    """[1] slot of the recurrent state after the last unit of the key. Wanted by the Mamba caches, unused by others."""
    prev_prefix_len: int = 0
    """Leading rows of `value` that are the tree's own. Mamba caches free the duplicates behind them themselves."""
    swa_evicted_seqlen: int = 0
    """Leading rows of `value` whose sliding-window rows were given up before, in whole pages."""


class InsertResult(NamedTuple):
    prefix_len: int
    """Units that were there before. Their rows in `value` are duplicates and the caller's to free."""
    total_len: int = 0
    """Units of the key that are in the tree now."""
    mamba_exist: bool = False
    """The state in `mamba_value` was not taken: its slot stays the caller's."""


class EvictParams(NamedTuple):
    num_tokens: int
    mamba_num: int = 0
    """Recurrent states to free besides."""
    swa_num_tokens: int = 0
    """Units of sliding-window rows to free besides."""


class EvictResult(NamedTuple):
    num_tokens_evicted: int
    """More than asked for when the last node was longer, fewer when nothing was left."""
    mamba_num_evicted: int = 0
    """Recurrent states freed, those of evicted nodes included."""
    swa_num_tokens_evicted: int = 0
    """Units of sliding-window rows freed, those of evicted nodes included."""


class InitLoadBackParams(NamedTuple):
    best_match_node: TreeNode
    """As the match gave it."""
    host_hit_length: int
    mem_quota: int | None = None
    """Device units that the request may take; None: no limit."""
    req: Request | None = None


class DecLockRefParams(NamedTuple):
    """What a cache with several kinds of state must be told of the lock it takes back."""

    tickets: tuple[tuple[int, int], ...] = ()
    """(kind of state, what its component noted) of each kind that is locked besides KV."""


class IncLockRefResult(NamedTuple):
    delta: int
    """Minus the units that became protected."""
    node: TreeNode
    """The one that is locked, and to be unlocked: of a node that is not on the device the first above it that is."""
    tickets: tuple[tuple[int, int], ...] = ()
    """As in `DecLockRefParams`."""

    def to_dec_params(self) -> DecLockRefParams:
        """What the release of this very lock must be told."""
        return DecLockRefParams(self.tickets)


class DecLockRefResult(NamedTuple):
    delta: int
    """The units that became evictable."""


@dataclass(slots=True, eq=False)
class Request:
    """What a cache needs to know about a request in flight; the caches update it."""

    rid: str
    token_ids: Sequence[int] | npt.NDArray[np.integer]
    """Tokens whose KV has been computed, prompt and output alike: row `req_pool_idx` names a pool row for each."""
    req_pool_idx: int
    """Row in the `ReqToTokenPool`."""
    extra_key: str | None = None
    priority: int = 0
    last_node: TreeNode | None = None
    """Node whose path the request has locked."""
    cache_protected_len: int = 0
    """Leading rows that belong to the tree, page-aligned; those after it are the request's own."""
    prefix_indices: IndexArray = field(default_factory=no_indices)
    """Rows of all tokens computed so far."""
    mamba_pool_idx: IndexArray | None = None
    """[1] slot of the running recurrent state; the request's own."""
    mamba_cow_src_index: IndexArray | None = None
    """[1] slot of the tree that the request must copy to `mamba_pool_idx` while `last_node` is locked."""
    mamba_last_track_seqlen: int | None = None
    """Tokens behind the state in `mamba_track_idx`, whole pages. None: no state was tracked since the last time."""
    mamba_track_idx: IndexArray | None = None
    """[1] slot of the tracked state, the request's own; wanted by a cache with an extra buffer."""
    lock_params: DecLockRefParams | None = None
    """Of the lock on `last_node`; wanted by a cache with several kinds of state."""
    swa_evicted_seqlen: int = 0
    """Leading tokens whose sliding-window rows the engine has given up, in whole pages."""
    swa_host_hit_length: int = 0
    """As the match gave it; so is the next one."""
    mamba_host_hit_length: int = 0


class BasePrefixCache(ABC):
    """Pages of earlier prompts, kept for later ones. Belongs to one thread.

    A cache without a host tier never waits. One with a host tier waits for copies to the host in four places: where a
    write-back evicts, where pages from a store come below a node whose own copy is under way, where a store is
    detached, and in `reset`.

    The tree owns the device rows of the pages it stores and frees them when it evicts; it keeps whole pages only. Keys
    are cut to whole pages first, and a key without one gives the empty result and changes nothing.
    """

    @abstractmethod
    def reset(self) -> None:
        """Forget everything. The rows are not freed: the owner clears the pools."""

    @abstractmethod
    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """The longest cached prefix. Refreshes access times; may split a node so that the match ends at one."""

    @abstractmethod
    def insert(self, params: InsertParams) -> InsertResult:
        """Take over the rows of those pages that are not there yet. Raises InvalidValueError if `value` is shorter
        than the key."""

    @abstractmethod
    def evict(self, params: EvictParams) -> EvictResult:
        """Free at least `num_tokens` units of device rows if unlocked nodes hold as many, whole nodes at a time."""

    @abstractmethod
    def inc_lock_ref(self, node: TreeNode) -> IncLockRefResult:
        """Forbid eviction of the node and everything above it. Raises CacheStateError for a node of another tree."""

    @abstractmethod
    def dec_lock_ref(self, node: TreeNode) -> DecLockRefResult:
        """Take one `inc_lock_ref` back, of the node that it has named. Raises CacheStateError if there is none, or for
        a node of another tree."""

    @abstractmethod
    def cache_unfinished_req(self, req: Request, *, chunked: bool = False) -> None:
        """Share what a running request has computed: its whole pages go to the tree, its row and lock follow."""

    @abstractmethod
    def cache_finished_req(self, req: Request, *, is_insert: bool = True) -> None:
        """End a request: whole pages go to the tree (or are freed), the rest is freed, the lock released. Its row in
        the `ReqToTokenPool` stays the owner's to free."""

    @abstractmethod
    def evictable_size(self) -> int:
        """Units on the device that eviction could free."""

    @abstractmethod
    def protected_size(self) -> int:
        """Units on the device that locks hold."""

    def take_events(self) -> list[EngineEvent]:
        """All events since the last call, oldest first; a cache that records none has none."""
        return []
