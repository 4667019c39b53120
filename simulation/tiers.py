"""Host and disk of a simulated worker: what an engine does with them before and after it serves a request.

    match ── prefetch ──> host ── load back ──> device      before: found() on whatever tier the prompt lies
    insert ── backup ──> host ── archive ──> disk           after: settle()

Copies take no time here: whatever was begun has ended when a method returns.
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
    """What a request can go on from."""

    rows: IndexArray
    """Device rows of the prefix, the tree's own."""
    node: TreeNode
    """Node at the end of the prefix."""
    branching_seqlen: int | None = None
    """As in `MatchResult`, where KV goes on without a state."""


class Tiers:
    """A cache's copy engine and its store, which is attached here and announced like the other tiers."""

    def __init__(self, cache: TieredCache, engine: ManualCopyEngine, store: BytelessStore) -> None:
        self.store = store
        self._cache = cache
        self._engine = engine
        self._request_ids = count()
        attached, message = cache.attach_storage_backend(store, StoragePolicy(emit_storage_events=True))
        assert attached, message

    def find(self, key: RadixKey) -> Found:
        """The prefix of a prompt that is on any tier, on the device now as far as it has room."""
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
        """Let copies end and tell the tree, twice: the end of a backup is the beginning of an archive."""
        for _ in range(2):
            self._engine.drain()
            self._cache.check_hicache_events()

    def on_disk(self) -> tuple[U64Array, int]:
        """Sequence hashes of the pages on disk, and the number of those there that events say nothing of."""
        keys, announced = self.store.held_keys(), dict(self._cache.iter_announced())
        words = b"".join(event.sequence_hashes for key, event in announced.items() if key in keys)
        return np.frombuffer(words, "<u8").astype(np.uint64), len(keys - announced.keys())

    def _match(self, key: RadixKey) -> MatchResult:
        return self._cache.match_prefix(MatchPrefixParams(key))

    def _prefetch(self, key: RadixKey, anchor: TreeNode) -> bool:
        """Bring what the disk has behind the anchor's prefix to the host; whether that was anything."""
        req_id, rest = str(next(self._request_ids)), key[_prefix_len(anchor) :]
        self._cache.prefetch_from_storage(req_id, anchor, rest.raw, extra_key=key.extra_key)
        self.settle()  # a prefetch that found too little is over now
        self._cache.check_prefetch_progress(req_id)
        return self._cache.pop_prefetch_loaded_tokens(req_id) > 0


def _prefix_len(node: TreeNode) -> int:
    """Units from the root to the end of the node."""
    length = 0
    step: TreeNode | None = node
    while step is not None:
        length += len(step.key)
        step = step.parent
    return length
