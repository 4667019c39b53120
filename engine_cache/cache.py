"""TreeCache: a prefix cache that combines one radix tree, the kinds of state of a model, and one to three tiers.

    TreeCache ── tree        keys, nodes, splits, locks, eviction order
              ├─ components  recurrent states, sliding windows: the rules of each kind of state
              ├─ device      rows on the device
              ├─ host        None, or copies on the host: backups, load-backs
              └─ store       None, or an attached storage backend: archives, prefetches

The classes of `presets.py` choose components, tiers and rules. A scheduler can make the same calls with any set of
tiers. Calls that concern a missing tier have no effect.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from engine_cache.base import (
    BasePrefixCache,
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InitLoadBackParams,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    Request,
)
from engine_cache.components.component import AuxiliaryComponent
from engine_cache.components.mamba import MambaComponent
from engine_cache.pools.allocators import PagedTokenToKVPoolAllocator, ReqToTokenPool, SWATokenToKVPoolAllocator
from engine_cache.requests import Requests
from engine_cache.sanity import check_tree
from engine_cache.storage.base import HiCacheStorage, PoolName
from engine_cache.storage.operations import ArchiveOperation, PrefetchOperation, StoragePolicy
from engine_cache.tiers.backup import BackupOperation
from engine_cache.tiers.device import DeviceTier
from engine_cache.tiers.host import HostTier
from engine_cache.tiers.storage import StorageTier
from engine_cache.tiers.transfer import HiCacheController
from engine_cache.tree.events import EventRecorder, KVCacheEventMixin, salted_seed
from engine_cache.tree.eviction import EvictionQueue, find_policy
from engine_cache.tree.key import RadixKey
from engine_cache.tree.node import TreeNode
from engine_cache.tree.tree import RadixTree
from engine_cache.types import IndexArray, no_indices
from engine_cache.variants import CacheVariant
from engine_cache.walks import Walks
from kv_events.errors import InvalidValueError, check_type
from kv_events.schema import BlockStored

logger = logging.getLogger(__name__)

_MOST_LOADED_NOTES = 4_096


class TreeCache(KVCacheEventMixin, BasePrefixCache):
    """Common implementation of all caches.

    page_size: units per page. allocator: frees the rows of evicted and duplicate pages; None leaves them to the caller.
    components: the kinds of state besides Full KV, for this cache alone. req_to_token_pool: rows of running requests.
    eviction_policy: a name in `EVICTION_POLICIES`. is_eagle: keys are converted to bigrams. disable: nothing is cached
    and every result is empty. seed_of_extra_key: returns the seed of a namespace's local hashes.
    enable_kv_cache_events, emit_group_events: record what `take_events` and `take_group_events` return.
    """

    def __init__(
        self,
        *,
        page_size: int,
        allocator: PagedTokenToKVPoolAllocator | SWATokenToKVPoolAllocator | None,
        components: Sequence[AuxiliaryComponent] = (),
        variant: CacheVariant,
        req_to_token_pool: ReqToTokenPool | None = None,
        eviction_policy: str = "lru",
        enable_kv_cache_events: bool = False,
        emit_group_events: bool = False,
        is_eagle: bool = False,
        disable: bool = False,
        seed_of_extra_key: Callable[[str], int] = salted_seed,
    ) -> None:
        check_type("allocator", allocator, PagedTokenToKVPoolAllocator | SWATokenToKVPoolAllocator | None)
        check_type("req_to_token_pool", req_to_token_pool, ReqToTokenPool | None)
        if not isinstance(page_size, int) or page_size < 1:
            raise InvalidValueError("page_size", page_size, "a positive integer")
        if allocator is not None and allocator.page_size != page_size:
            raise InvalidValueError("page_size", page_size, f"the allocator's, {allocator.page_size}")
        if emit_group_events and not enable_kv_cache_events:
            raise InvalidValueError("emit_group_events", True, "False without enable_kv_cache_events")
        self.page_size = page_size
        self.allocator = allocator.full if isinstance(allocator, SWATokenToKVPoolAllocator) else allocator
        """Owner of the rows of Full KV."""
        self.req_to_token_pool = req_to_token_pool
        self.is_eagle = is_eagle
        self.disable = disable
        self.variant = variant
        self.auxiliaries = tuple(components)
        self.event_groups = tuple(component.event_group for component in components)
        groups = self.event_groups if emit_group_events else ()
        self.events = EventRecorder(
            page_size, enabled=enable_kv_cache_events, groups=groups, seed_of_extra_key=seed_of_extra_key
        )
        policy, copies_hits = find_policy(eviction_policy), variant.split_copies_hits
        self.tree = RadixTree(
            page_size, policy, is_eagle=is_eagle, has_states=bool(components), split_copies_hits=copies_hits
        )
        for component in components:
            component.attach(self.tree, self.events)
        self.device = DeviceTier(self.tree, self.events, allocator, self.auxiliaries, variant)
        self.host: HostTier | None = None
        """None if the device is the only tier."""
        self.store: StorageTier | None = None
        """None if no storage backend is attached."""
        self.states = next((each for each in components if isinstance(each, MambaComponent)), None)
        """None if the model has no recurrent layers."""
        self.prefetch_loaded_tokens_by_reqid: dict[str, int] = {}
        self._evictor: DeviceTier | HostTier = self.device  # decides what happens to an evicted device leaf
        self._requests = Requests(self, self.device, self.states)
        self._walks = Walks(self.device, self.states, self._requests)
        self.events.all_cleared()

    def _add_host_tier(self, controller: HiCacheController, write_policy: str, load_back_threshold: int) -> None:
        """Add a host tier, whose errors are passed on. The cache must be empty."""
        assert self.allocator is not None
        self.host = self._evictor = HostTier(self.device, controller, self.allocator, write_policy, load_back_threshold)
        self._walks.backups = self.host.backups

    def reset(self) -> None:
        for tier in (self.host, self.store):
            if tier is not None:
                tier.clear()
        for component in self.auxiliaries:
            component.clear()
        self.prefetch_loaded_tokens_by_reqid.clear()
        self.tree.clear()
        self.events.all_cleared()

    def evictable_size(self) -> int:
        return self.tree.evictable_size

    def protected_size(self) -> int:
        return self.tree.protected_size

    @property
    def evictable_leaves(self) -> EvictionQueue:
        return self.tree.device_leaves

    @property
    def evictable_host_leaves(self) -> EvictionQueue:
        return self.tree.host_leaves

    def sanity_check(self) -> None:
        """Recount sizes, locks, leaves and LRU lists. Raises CacheStateError with both figures of a mismatch."""
        check_tree(self.tree, self.auxiliaries)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        if params.cow_mamba and params.req is None:
            raise InvalidValueError("req", None, "the request that takes the state, with cow_mamba")
        return self._walks.match(self.whole_pages(params.key), params)

    def whole_pages(self, key: RadixKey) -> RadixKey:
        """Convert the key to units and cut it to whole pages. Raises TransferError after a failed load."""
        return self._whole_pages(key, None)[0]

    def _whole_pages(self, key: RadixKey, value: IndexArray | None) -> tuple[RadixKey, IndexArray | None]:
        if self.host is not None:
            self.host.controller.require_loads()
        key, value = self.tree.whole_pages(key, value)
        return key[:0] if self.disable else key, value

    def insert(self, params: InsertParams) -> InsertResult:
        if self.disable:
            return InsertResult(0, mamba_exist=self.variant.frees_duplicates)
        key, value = self._whole_pages(params.key, params.value)
        return self._walks.insert(key, value, params)

    def evict(self, params: EvictParams) -> EvictResult:
        full, before = self.tree.evictable_size, {each.pool: each.device_size for each in self.auxiliaries}
        self._evictor.evict_leaves(params.num_tokens)
        if not self.auxiliaries:
            return EvictResult(full - self.tree.evictable_size)
        for each in self.auxiliaries:
            requested = params.mamba_num if each.pool is PoolName.MAMBA else params.swa_num_tokens
            num_freed = (before[each.pool] - each.device_size) * self.variant.shares_eviction
            self._evictor.evict_component(each, requested - num_freed)
        freed = {each.pool: before[each.pool] - each.device_size for each in self.auxiliaries}
        return EvictResult(full - self.tree.evictable_size, freed.get(PoolName.MAMBA, 0), freed.get(PoolName.SWA, 0))

    def evict_mamba_host(self, mamba_num: int) -> int:
        """Free recurrent states on the host, least recently used first. Returns their number."""
        if self.host is None or self.states is None:
            return 0
        return self.host.leaves.evict_component(self.states, mamba_num)

    def evict_full(self, num_tokens: int) -> EvictResult:
        """Evict leaves until `num_tokens` units of KV are free or none is left."""
        return self.evict(EvictParams(num_tokens))

    def evict_mamba(self, mamba_num: int) -> EvictResult:
        """Free recurrent states on the device, least recently used first."""
        return self.evict(EvictParams(0, mamba_num=mamba_num))

    def inc_lock_ref(self, node: TreeNode) -> IncLockRefResult:
        return IncLockRefResult(0, node) if self.disable else self.device.lock(node)

    def dec_lock_ref(self, node: TreeNode, params: DecLockRefParams | None = None) -> DecLockRefResult:
        if self.disable:
            return DecLockRefResult(0)
        result = self.device.unlock(node, None if params is None else params.tickets)
        if self.host is None and self.device.is_useless(node):  # it lost its last child while it was locked
            self.device.evict_leaf(node)
        return result

    def release(self, lock: IncLockRefResult) -> DecLockRefResult:
        """Undo the `inc_lock_ref` that returned `lock`."""
        return self.dec_lock_ref(lock.node, lock.to_dec_params())

    def cache_unfinished_req(self, req: Request, *, chunked: bool = False) -> None:
        self._requests.unfinished(req, chunked=chunked)

    def cache_finished_req(self, req: Request, *, is_insert: bool = True) -> None:
        self._requests.finished(req, is_insert=is_insert)

    # --- host tier --------------------------------------------------------------------------------------------------

    @property
    def cache_controller(self) -> HiCacheController | None:
        """Moves data between the tiers. None without a host tier."""
        return None if self.host is None else self.host.controller

    @property
    def ongoing_write_through(self) -> Mapping[int, BackupOperation]:
        return {} if self.host is None else self.host.backups.ongoing

    @property
    def ongoing_load_back(self) -> Mapping[int, TreeNode]:
        return {} if self.host is None else self.host.ongoing_loads

    @property
    def num_failed_backups(self) -> int:
        """Copies to the host that failed twice since the cache was created."""
        return 0 if self.host is None else self.host.backups.num_failed

    @property
    def num_refused_backups(self) -> int:
        """Copies to the host that were refused for lack of room since the cache was created."""
        return 0 if self.host is None else self.host.backups.num_refused

    def check_hicache_events(self) -> None:
        """Process finished work: backups, loads, then the results of the storage tier."""
        self.writing_check()
        self.loading_check()
        if self.store is not None:
            self.store.check_events()

    def writing_check(self, write_back: bool = False) -> None:
        """Process finished backups, oldest first. write_back: wait for all of them."""
        if self.host is not None:
            self.host.backups.writing_check(write_back)

    def flush_write_through_acks(self) -> None:
        self.writing_check()

    def loading_check(self) -> None:
        """Unlock the nodes whose load has finished. Raises TransferError after a failed load: reset the cache then."""
        if self.host is not None:
            self.host.loading_check()

    def ready_to_load_host_cache(self) -> int:
        """Start the queued loads. Returns the number with which to wait for layers, or -1 if no load was queued."""
        return -1 if self.host is None else self.host.controller.start_loading()

    def write_backup(self, node: TreeNode, write_back: bool = False) -> int:
        """Start to copy a device node to the host.

        Returns its units, or 0 if there is no room or its parent has no host copy. The pages stay locked until
        `writing_check`, except in a write-back.
        """
        return 0 if self.host is None else self.host.backups.write(node, write_back)

    def evict_host(self, num_tokens: int) -> int:
        """Delete nodes that are only on the host until `num_tokens` host rows are free. Returns their number."""
        return 0 if self.host is None else self.host.leaves.evict(num_tokens)

    def load_back(self, node: TreeNode, mem_quota: int | None = None, req: Request | None = None) -> IndexArray | None:
        """Allocate device rows for an evicted node, its evicted ancestors and the states that a match at the node
        needs.

        `ready_to_load_host_cache` fills them. Returns the KV rows, root side first. Returns None, and loads nothing, if
        the load is too small, exceeds `mem_quota` units, or the device has no room.
        """
        return None if self.host is None else self.host.load_back(node, mem_quota, req)

    def init_load_back(self, params: InitLoadBackParams) -> tuple[IndexArray, TreeNode]:
        """Load back a match if it is large enough.

        Returns the rows that KV received in this load, and the deepest node from which the request can continue now, in
        what remains of the match. With recurrent states, `device_indices` may extend beyond that node; the request
        keeps the rows up to it. Raises CacheStateError for a node of another tree or from before a reset, and
        PoolExhaustedError if there is no slot for the state that the request starts from.
        """
        node, states = params.best_match_node, self.states
        lacking = node if states is None else states.data(node)
        if lacking.value is None and lacking.host_value is not None:
            rows = self.load_back(node, params.mem_quota, params.req)
            if rows is not None:
                return rows, node
        while not self._can_continue_from(node):
            above = node.parent or node.former_parent
            assert above is not None
            node = above
        self.tree.path_to_root(node)
        if params.req is not None and states is not None:
            self._requests.copy_on_write(params.req, states.data(node).value, [node])
        return no_indices(), node

    def _can_continue_from(self, node: TreeNode) -> bool:
        has_state = node is self.tree.root or self.states is None or self.states.data(node).value is not None
        return has_state and node.former_parent is None and node.value is not None

    # --- storage tier -----------------------------------------------------------------------------------------------

    @property
    def ongoing_prefetch(self) -> Mapping[str, PrefetchOperation]:
        """Prefetches whose pages are not in the tree yet, by request."""
        return {} if self.store is None else self.store.ongoing_prefetches

    @property
    def ongoing_backup(self) -> Mapping[ArchiveOperation, TreeNode]:
        return {} if self.store is None else self.store.ongoing_archives

    @property
    def prefetch_tokens_occupied(self) -> int:
        """Units on the host that belong to prefetches."""
        return 0 if self.store is None else self.store.prefetch_tokens_occupied

    @property
    def archive_tokens_occupied(self) -> int:
        """Units on the host that must stay there until they are archived."""
        return 0 if self.store is None else self.store.archive_tokens_occupied

    @property
    def num_skipped_archives(self) -> int:
        """Number of nodes, since the cache was created, not archived because too many host rows were waiting."""
        return 0 if self.host is None else self.host.num_skipped_archives

    def attach_storage_backend(self, backend: HiCacheStorage, policy: StoragePolicy | None = None) -> tuple[bool, str]:
        """Attach a storage backend to an idle cache, or update the policy of an attached one.

        Returns whether it is attached now, and a message. policy: defaults to that of an attached backend, else to
        `StoragePolicy()`.
        """
        if self.host is None:
            return False, "the cache has no host tier"
        if self.store is None:
            try:
                self.attach_store(backend, policy)
            except Exception as error:  # a backend may raise anything, and the cache works without it
                logger.exception("the storage backend refuses the pools")
                return False, f"the storage backend refuses the pools: {error}"
            return True, "attached"
        if self.store.io.backend is not backend:
            return False, "another store is attached, detach it first"
        self.store.io.policy = policy or self.store.io.policy
        return True, "attached already" if policy is None else "attached already, policy updated"

    def attach_store(self, backend: HiCacheStorage, policy: StoragePolicy | None = None) -> None:
        """Attach a storage backend. Raises the errors of `StorageTier`, and InvalidValueError if there is one."""
        if self.host is None:
            raise InvalidValueError("store", type(backend).__name__, "a cache with a host tier")
        if self.store is not None:
            raise InvalidValueError("store", type(backend).__name__, "a cache without one")
        self.store = StorageTier(self.host, backend, policy or StoragePolicy())

    def detach_storage_backend(self) -> tuple[bool, str]:
        """Abort all storage operations and release the backend, which stays open. Returns success and a message."""
        if self.store is None:
            return True, "no store is attached"
        failure = self.store.detach()
        if failure is not None:
            return False, failure
        self.store = None
        return True, "detached"

    def clear_storage_backend(self) -> None:
        """Remove every page of this model and rank from the storage backend."""
        if self.store is not None:
            self.store.clear_store()

    def iter_announced(self) -> Iterator[tuple[str, BlockStored]]:
        """Return storage key and event of every page that events report in the storage backend."""
        return iter(()) if self.store is None else iter(self.store.announced.items())

    def prefetch_from_storage(
        self,
        req_id: str,
        last_host_node: TreeNode,
        new_input_tokens: Sequence[int] | npt.NDArray[np.integer],
        last_hash: str | None = None,
        extra_key: str | None = None,
    ) -> None:
        """Start to fetch the pages of `new_input_tokens`, which continue the prefix of `last_host_node`.

        last_host_node: from the result of a match. extra_key: the namespace, if the node is the root. last_hash: the
        node's last block hash, computed by default.

        Does nothing without a backend, for too few units, above the rate limit, without room on the host, if the node
        has lost its host copy, or if no match could use the pages. Raises InvalidValueError for a second prefetch of a
        request, and if extra_key or last_hash does not fit the node.
        """
        if req_id in self.ongoing_prefetch:
            raise InvalidValueError("req_id", req_id, "a request without a prefetch in flight")
        is_root = last_host_node is self.tree.root
        namespace = extra_key if is_root else last_host_node.key.extra_key
        if extra_key is not None and extra_key != namespace:
            raise InvalidValueError("extra_key", extra_key, f"that of node {last_host_node.id}, {namespace!r}")
        if self.store is not None and (is_root or last_host_node.host_value is not None):
            key = self.whole_pages(RadixKey(new_input_tokens, namespace))
            self.store.prefetch(req_id, last_host_node, key, last_hash)

    def check_prefetch_progress(self, req_id: str) -> bool:
        """Return whether the request can stop waiting. The first time it can, the tree receives the fetched pages."""
        if self.store is None or req_id not in self.store.ongoing_prefetches:
            return True
        loaded = self.store.finish_prefetch(req_id)
        if loaded is None:
            return False
        noted = self.prefetch_loaded_tokens_by_reqid
        noted.pop(req_id, None)
        if loaded > 0:
            noted[req_id] = loaded
        if len(noted) > _MOST_LOADED_NOTES:  # not every engine calls pop_prefetch_loaded_tokens
            del noted[next(iter(noted))]
        return True

    def pop_prefetch_loaded_tokens(self, req_id: str) -> int:
        """Return the units that a prefetch added to the tree, once. 0 without a prefetch or after 4,096 newer ones."""
        return self.prefetch_loaded_tokens_by_reqid.pop(req_id, 0)

    def release_aborted_request(self, req_id: str) -> None:
        """Abort the prefetch of a request that will not run, if it has one."""
        self.prefetch_loaded_tokens_by_reqid.pop(req_id, None)
        if self.store is not None:
            self.store.abort_prefetch(req_id)
