"""RadixCache: the prefix cache of one tier, the device.

    root ── system prompt ──┬── user A, turn 1 ── turn 2      every edge: whole pages, key and rows of equal length
                            └── user B, turn 1

A prompt is walked page-key by page-key; where it leaves the middle of a node the node is split, so every answer ends at
a node. Locks run from a node to the root, so what is locked is always a prefix, and eviction takes leaves only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count

import numpy as np

from engine_cache.base import (
    BasePrefixCache,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    Request,
)
from engine_cache.checks import check_radix_cache
from engine_cache.errors import CacheStateError
from engine_cache.pools.allocators import PagedTokenToKVPoolAllocator
from engine_cache.pools.req_to_token import ReqToTokenPool
from engine_cache.tree.events import KVCacheEventMixin
from engine_cache.tree.eviction import EvictionQueue, find_policy
from engine_cache.tree.key import RadixKey
from engine_cache.tree.node import TreeNode, split_node_hash_value, split_node_sequence_hash, split_rows
from engine_cache.types import IndexArray, no_indices
from kv_events.errors import InvalidValueError
from kv_events.hashing import namespace_seed
from kv_events.schema import EngineEvent

_LOWEST_PRIORITY = -sys.maxsize


def salted_seed(extra_key: str) -> int:
    """The default `seed_of_extra_key`: the namespace is a cache salt."""
    return namespace_seed(cache_salt=extra_key)


class RadixCache(KVCacheEventMixin, BasePrefixCache):
    """A radix tree over device pages.

    page_size: units a page. allocator: takes back the rows of evicted and duplicate pages; without one they are the
    caller's business. req_to_token_pool: rows of running requests, wanted only by `cache_unfinished_req` and
    `cache_finished_req`. eviction_policy: a name in `EVICTION_POLICIES`. is_eagle: keys are taken as bigrams. disable:
    nothing is cached, every answer is empty. seed_of_extra_key: seed of a namespace's local hashes.
    enable_kv_cache_events: record what `take_events` gives; emit_group_events: and what `take_group_events` does.
    """

    def __init__(
        self,
        *,
        page_size: int,
        allocator: PagedTokenToKVPoolAllocator | None = None,
        req_to_token_pool: ReqToTokenPool | None = None,
        eviction_policy: str = "lru",
        enable_kv_cache_events: bool = False,
        emit_group_events: bool = False,
        is_eagle: bool = False,
        disable: bool = False,
        seed_of_extra_key: Callable[[str], int] = salted_seed,
    ) -> None:
        if page_size < 1:
            raise InvalidValueError("page_size", page_size, "a positive integer")
        if allocator is not None and allocator.page_size != page_size:
            raise InvalidValueError("page_size", page_size, f"the allocator's, {allocator.page_size}")
        if emit_group_events and not enable_kv_cache_events:
            raise InvalidValueError("emit_group_events", True, "False without enable_kv_cache_events")
        self.page_size = page_size
        self.allocator = allocator
        self.req_to_token_pool = req_to_token_pool
        self.enable_kv_cache_events = enable_kv_cache_events
        self.kv_event_queue: list[EngineEvent] = []
        self.emit_group_events = emit_group_events
        self.group_event_queues = {group: [] for group in self.event_groups if emit_group_events}
        self.is_eagle = is_eagle
        self.disable = disable
        self.seed_of_extra_key = seed_of_extra_key
        self._policy = find_policy(eviction_policy)
        self._clock = count(1)
        self._node_ids = count()
        self.reset()

    def reset(self) -> None:
        self.root_node = self._new_node(RadixKey([]), no_indices(), None, _LOWEST_PRIORITY)
        self.root_node.lock_ref = 1
        self.root_node.hash_value = []
        self.evictable_leaves = EvictionQueue(self._policy)
        self._evictable_size = 0
        self._protected_size = 0
        self._record_all_cleared_event()

    def evictable_size(self) -> int:
        return self._evictable_size

    def protected_size(self) -> int:
        return self._protected_size

    def check(self, request_indices: IndexArray | None = None) -> None:
        """Recount every invariant of the tree. Raises CacheStateError with both figures of the first that fails.

        request_indices: rows that running requests own besides the tree's; given, the allocator's pages must add up.
        """
        check_radix_cache(self, request_indices)

    # --- match and insert -------------------------------------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        key, _ = self._whole_pages(params.key, None)
        path, _ = self._descend(key)
        self._touch(path)
        last = path[-1] if path else self.root_node
        return MatchResult(self._device_rows(path), last, last, last)

    def _device_rows(self, path: list[TreeNode]) -> IndexArray:
        return np.concatenate([_rows(node) for node in path]) if path else no_indices()

    def insert(self, params: InsertParams) -> InsertResult:
        if self.disable:
            return InsertResult(0)
        key, value = self._whole_pages(params.key, params.value)
        path, prefix_len = self._descend(key)
        self._touch(path)
        for node in path:
            self._count_hit(node, params)
        if prefix_len < len(key):
            rows = key.raw.astype(np.int64) if value is None else value
            leaf = self._add_leaf(path[-1] if path else self.root_node, key, rows, prefix_len, params.priority)
            self._count_hit(leaf, params)
        return InsertResult(prefix_len, len(key))

    def _whole_pages(self, key: RadixKey, value: IndexArray | None) -> tuple[RadixKey, IndexArray | None]:
        """The key as this tree takes it. An empty key where nothing is cached."""
        if key.is_bigram and not self.is_eagle:
            raise InvalidValueError("key.is_bigram", True, "False, this cache holds plain tokens")
        key, value = key.maybe_to_bigram_view(self.is_eagle, value)
        if value is not None and len(value) < len(key):
            raise InvalidValueError("value", f"{len(value)} rows", f"one for each of {len(key)} units")
        return key[:0] if self.disable else key.page_aligned(self.page_size), value

    def _descend(self, key: RadixKey, *, touch: bool = False) -> tuple[list[TreeNode], int]:
        """Nodes along the longest cached prefix of a page-aligned key, and its length. Splits the last one if the
        prefix ends inside it. touch: mark the nodes as used, before that split does so with its lower part."""
        node, done, path = self.root_node, 0, []
        while done < len(key):
            child = self._next_on_path(node, key, done)
            if child is None:
                break
            if touch:
                self._touch_on_insert(child)
            path.append(child)
            done += len(child.key)
            node = child
        return path, done

    def _touch_on_insert(self, node: TreeNode) -> None:
        """An insert passes the node."""
        self._touch([node])

    def _next_on_path(self, node: TreeNode, key: RadixKey, done: int) -> TreeNode | None:
        """The child that goes on along a key of which `done` units lead to its parent; split if the key ends inside."""
        child = node.children.get(key.page_key(self.page_size, done))
        if child is None:
            return None
        shared = key.match(child.key, self.page_size, done)
        return self._split_node(child, shared) if shared < len(child.key) else child

    def _touch(self, path: list[TreeNode]) -> None:
        """The nodes, parents before children, have been used now."""
        for node in path:
            node.last_access_time = next(self._clock)
        self.evictable_leaves.used(path)

    def _count_hit(self, node: TreeNode, params: InsertParams) -> None:
        node.priority = max(node.priority, params.priority)
        node.hit_count += not params.chunked

    def _add_leaf(self, parent: TreeNode, key: RadixKey, value: IndexArray, start: int, priority: int) -> TreeNode:
        rest = key[start:]
        leaf = self._new_node(rest, value[start : len(key)].astype(np.int64), parent, priority)
        self._record_store_event(leaf)  # before anything changes: naming the pages may fail
        parent.children[rest.page_key(self.page_size)] = leaf
        parent.num_device_children += 1
        self._evictable_size += len(rest)
        self.evictable_leaves.discard(parent)
        self.evictable_leaves.add(leaf)
        return leaf

    def _split_node(self, child: TreeNode, split_len: int) -> TreeNode:
        """Put a new node above `child` that takes its first `split_len` units. `child` stays what its users hold: the
        deeper end. Both parts count as used now."""
        parent, page_size = child.parent, self.page_size
        assert parent is not None
        whole_key = child.key
        upper_rows, lower_rows = split_rows(child.value, split_len)
        upper = self._new_node(whole_key[:split_len], upper_rows, parent, child.priority)
        child.key, child.value = whole_key[split_len:], lower_rows
        upper.lock_ref, upper.hit_count = child.lock_ref, child.hit_count
        upper.creation_time = child.creation_time
        upper.hash_value, child.hash_value = split_node_hash_value(child.hash_value, split_len, page_size)
        upper.sequence_hash, child.sequence_hash = split_node_sequence_hash(child.sequence_hash, split_len, page_size)
        parent.children[upper.key.page_key(page_size)] = upper
        upper.children[child.key.page_key(page_size)] = child
        upper.num_device_children = int(child.value is not None)
        child.parent = upper
        self._touch([upper, child])
        return upper

    def _new_node(self, key: RadixKey, value: IndexArray | None, parent: TreeNode | None, priority: int) -> TreeNode:
        return TreeNode(next(self._node_ids), key, value, parent, next(self._clock), priority)

    # --- eviction and locks -----------------------------------------------------------------------------------------

    def evict(self, params: EvictParams) -> EvictResult:
        evicted = 0
        while evicted < params.num_tokens and (leaf := self.evictable_leaves.pop()) is not None:
            self._delete_leaf(leaf)
            evicted += len(leaf.key)
        return EvictResult(evicted)

    def _delete_leaf(self, leaf: TreeNode) -> TreeNode:
        parent = leaf.parent
        assert parent is not None
        self._free(_rows(leaf))
        del parent.children[leaf.key.page_key(self.page_size)]
        parent.num_device_children -= 1
        self._evictable_size -= len(leaf.key)
        self._record_remove_event(leaf)
        leaf.detach()
        self.evictable_leaves.discard(leaf)
        self._update_leaf(parent)
        return parent

    def inc_lock_ref(self, node: TreeNode) -> IncLockRefResult:
        if self.disable:
            return IncLockRefResult(0, node)
        protected = 0
        for step in self._path_to_root(node):
            if step.lock_ref == 0:
                protected += len(step.key)
            step.lock_ref += 1
        self._evictable_size -= protected
        self._protected_size += protected
        self._update_leaf(node)
        return IncLockRefResult(-protected, node)

    def dec_lock_ref(self, node: TreeNode) -> DecLockRefResult:
        if self.disable:
            return DecLockRefResult(0)
        path = self._path_to_root(node)
        if path and node.lock_ref < 1:
            raise CacheStateError(f"node {node.id} unlocked with lock_ref {node.lock_ref}, expected at least 1")
        released = 0
        for step in path:
            step.lock_ref -= 1
            if step.lock_ref == 0:
                released += len(step.key)
        self._evictable_size += released
        self._protected_size -= released
        self._update_leaf(node)
        return DecLockRefResult(released)

    def release(self, lock: IncLockRefResult) -> DecLockRefResult:
        """Take back the lock that `inc_lock_ref` gave."""
        return self.dec_lock_ref(lock.node)

    def _path_to_root(self, node: TreeNode) -> list[TreeNode]:
        """The node and its ancestors below the root."""
        path = []
        step: TreeNode | None = node
        while step is not self.root_node:
            if step is None:
                raise CacheStateError(f"node {node.id} does not hang below root {self.root_node.id}")
            path.append(step)
            step = step.parent
        return path

    def _is_evictable_leaf(self, node: TreeNode) -> bool:
        return node.value is not None and node.lock_ref == 0 and not node.num_device_children

    def _update_leaf(self, node: TreeNode) -> None:
        if self._is_evictable_leaf(node):
            self.evictable_leaves.add(node)
        else:
            self.evictable_leaves.discard(node)

    # --- requests ---------------------------------------------------------------------------------------------------
    #
    #   row of a request   | cache_protected_len | ... prefix_len | ... whole pages | tail
    #   owner before       | tree                | request        | request         | request
    #   after the insert   | tree                | duplicate,     | tree            | request
    #                      |                     | freed          |                 |

    def cache_unfinished_req(self, req: Request, *, chunked: bool = False) -> None:
        rows = self._request_rows().read(req.req_pool_idx, len(req.token_ids))
        if self.disable:
            req.prefix_indices = rows
            return
        key = self._insert_request(req, rows, chunked=chunked)
        if len(key) >= req.cache_protected_len:
            self._share_rows(req, key, rows)
        else:  # bigrams: the token that ends the last unit it was given is not there yet
            req.prefix_indices = rows

    def _share_rows(self, req: Request, key: RadixKey, rows: IndexArray) -> None:
        """Put the request on the tree's rows of `key`, which was just inserted, and its lock on their last node."""
        match = self.match_prefix(MatchPrefixParams(key))
        shared = match.device_indices
        pool = self._request_rows()
        pool.write(req.req_pool_idx, req.cache_protected_len, shared[req.cache_protected_len :])
        self._move_lock(req, match.last_device_node)
        req.cache_protected_len = len(shared)
        req.prefix_indices = np.concatenate((shared, rows[len(shared) :]))

    def cache_finished_req(self, req: Request, *, is_insert: bool = True) -> None:
        rows = self._request_rows().read(req.req_pool_idx, len(req.token_ids))
        if self.disable:
            self._free(rows)
            return
        own_from = req.cache_protected_len
        if is_insert:
            own_from = max(own_from, len(self._insert_request(req, rows, chunked=False)))
        self._free(rows[own_from:])
        self._move_lock(req, None)

    def _insert_request(self, req: Request, rows: IndexArray, *, chunked: bool) -> RadixKey:
        """Insert the request's whole pages and free its duplicates; the key that is in the tree now."""
        key, _ = self._whole_pages(RadixKey(req.token_ids, req.extra_key), None)
        result = self.insert(InsertParams(key, rows[: len(key)], chunked=chunked, priority=req.priority))
        self._free(rows[req.cache_protected_len : result.prefix_len])
        return key

    def _move_lock(self, req: Request, node: TreeNode | None) -> None:
        if req.last_node is not None:
            self.dec_lock_ref(req.last_node)
        req.last_node = None if node is None else self.inc_lock_ref(node).node

    def _request_rows(self) -> ReqToTokenPool:
        if self.req_to_token_pool is None:
            raise CacheStateError("this cache was made without a req_to_token_pool, it cannot cache requests")
        return self.req_to_token_pool

    def _free(self, indices: IndexArray) -> None:
        if self.allocator is not None and len(indices):
            self.allocator.free(indices)


def _rows(node: TreeNode) -> IndexArray:
    assert node.value is not None, f"node {node.id} has no device rows"
    return node.value
