"""Host and disk of a simulated worker: the steps of an engine before and after it serves a request.

    match ── prefetch ──> host ── load back ──> device      before: found(), on any tier
    insert ── backup ──> host ── archive ──> disk           after: settle()

Copies take no time here: every copy has ended when a method returns.
"""

from __future__ import annotations

from itertools import count
from typing import NamedTuple, TypeAlias

import numpy as np

from engine_cache import (
    HiMambaRadixCache,
    HiRadixCache,
    IndexArray,
    InitLoadBackParams,
    ManualCopyEngine,
    MatchPrefixParams,
    MatchResult,
    RadixKey,
    StoragePolicy,
    TreeNode,
)
from kv_events.hashing import U64Array
from simulation.byteless_store import BytelessStore

TieredCache: TypeAlias = HiRadixCache | HiMambaRadixCache


class Found(NamedTuple):
    """The prefix that a request can reuse."""

    rows: IndexArray
    """Device rows of the prefix, owned by the tree."""
    node: TreeNode
    """Node at the end of the prefix."""
    branching_seqlen: int | None = None
    """As in `MatchResult`, if KV continues without a state."""


class Tiers:
    """A cache's copy engine and its storage backend, which is attached here and announced like the other tiers."""

    def __init__(self, cache: TieredCache, engine: ManualCopyEngine, store: BytelessStore) -> None:
        self.store = store
        self._cache = cache
        self._engine = engine
        self._request_ids = count()
        attached, message = cache.attach_storage_backend(store, StoragePolicy(emit_storage_events=True))
        assert attached, message

    def find(self, key: RadixKey) -> Found:
        """Return the cached prefix of a prompt, after copying it to the device as far as there is room."""
        match = self._match(key)
        if self._prefetch(key, match.last_host_node):
            match = self._match(key)
        rows, node = match.device_indices, match.last_device_node
        if match.host_hit_length or match.mamba_host_hit_length:
            loaded, node = self._cache.init_load_back(InitLoadBackParams(match.best_match_node, match.host_hit_length))
            self._cache.ready_to_load_host_cache()
            self.settle()
            rows = np.concatenate((rows, loaded))
        return Found(rows[: _prefix_len(node)], node, match.mamba_branching_seqlen)

    def settle(self) -> None:
        """Finish copies and update the tree, twice, because a finished backup starts an archive."""
        for _ in range(2):
            self._engine.drain()
            self._cache.check_hicache_events()

    def on_disk(self) -> tuple[U64Array, int]:
        """Return the sequence hashes of the pages on disk, and the number of pages there that were not announced."""
        keys, announced = self.store.held_keys(), dict(self._cache.iter_announced())
        words = b"".join(event.sequence_hashes for key, event in announced.items() if key in keys)
        return np.frombuffer(words, "<u8").astype(np.uint64), len(keys - announced.keys())

    def _match(self, key: RadixKey) -> MatchResult:
        return self._cache.match_prefix(MatchPrefixParams(key))

    def _prefetch(self, key: RadixKey, start_node: TreeNode) -> bool:
        """Prefetch the pages on disk that follow the prefix of the start node. Returns whether there were any."""
        req_id, rest = str(next(self._request_ids)), key[_prefix_len(start_node) :]
        self._cache.prefetch_from_storage(req_id, start_node, rest.raw, extra_key=key.extra_key)
        self.settle()  # a prefetch that found too little has ended
        self._cache.check_prefetch_progress(req_id)
        return self._cache.pop_prefetch_loaded_tokens(req_id) > 0


def _prefix_len(node: TreeNode) -> int:
    """Return the number of units from the root to the end of the node."""
    length = 0
    step: TreeNode | None = node
    while step is not None:
        length += len(step.key)
        step = step.parent
    return length
