"""What a `CacheRig` holds on each tier, and whether every number in it is what it must be."""

from typing import Any, NamedTuple

import numpy as np

from engine_cache import ComponentType
from engine_cache.storage.base import PoolName
from engine_cache.tree.node import TreeNode, iter_nodes
from engine_cache.types import no_indices
from kv_events.schema import StorageMedium
from tests.models.cache_checks import check_cache
from tests.rigs.cache_pools import contents

GPU, CPU = StorageMedium.GPU, StorageMedium.CPU
POOLS = {"full": PoolName.KV, "swa": PoolName.SWA, "mamba": PoolName.MAMBA}


class Place(NamedTuple):
    """Identifies a node by its pages."""

    node: Any
    extra_key: str | None
    prefixes: list[tuple[int, ...]]  # raw tokens up to the end of each page


class CacheContent:
    """Questions to the attributes of a `CacheRig`."""

    cache: Any
    page_size: int
    is_bigram: bool
    kinds: tuple[str, ...]
    pools: dict[PoolName, Any]
    host_pools: dict[PoolName, Any]
    requests: list[Any]
    loaded: dict[Any, Any]
    served: Any

    def prefixes(self, tokens, num_last=None):
        """Return the raw tokens of every prefix of whole pages, or of the last ones, shortest first."""
        pages = max(0, len(tokens) - self.is_bigram) // self.page_size
        first = 1 if num_last is None else pages - num_last + 1
        return [tuple(tokens[: n * self.page_size + self.is_bigram]) for n in range(first, pages + 1)]

    def used(self):
        """Return the host rows in use by pool, of pools that the cache uses."""
        return {
            name.value: pool.size - pool.available_size()
            for name, pool in self.host_pools.items()
            if name is PoolName.KV or name.value in self.kinds
        }

    def data(self, node, kind):
        return node.component_data[ComponentType[kind.upper()]]

    def has(self, tokens, kind):
        """Return whether the node that ends here has this kind on the device, and on the host."""
        data = self.data(self.node_of(tokens), kind)
        return data.value is not None, data.host_value is not None

    def node_of(self, tokens):
        """Return the node that ends where this prefix ends."""
        raw = self.prefixes(tokens)[-1]
        return next(place.node for place in self.walk() if (place.extra_key, place.prefixes[-1]) == (None, raw))

    def walk(self):
        raw_of: dict[TreeNode, tuple[int, ...]] = {self.cache.root_node: ()}
        for node in iter_nodes(self.cache.root_node):
            above = raw_of[node.parent]
            raw_of[node] = raw = above[: len(above) - self.is_bigram] + tuple(node.key.token_ids)
            yield Place(node, node.key.extra_key, self.prefixes(raw, len(node.key) // self.page_size))

    def ends(self, kind="full", field="value"):
        """Return the prefixes at the ends of the nodes that have this kind there, or a count above 0."""
        found = ((place, getattr(self.data(place.node, kind), field)) for place in self.walk())
        return {place.prefixes[-1] for place, held in found if (held if isinstance(held, int) else held is not None)}

    def held(self, medium, places=None):
        """Return `(namespace, raw tokens)` of every acknowledged page on the tier. places: what `walk` yields now."""
        return {
            (place.extra_key, raw)
            for place in (self.walk() if places is None else places)
            for raw in place.prefixes
            if (medium is GPU and place.node.value is not None)
            or (medium is CPU and place.node.host_value is not None and not is_pending(place.node))
        }

    def held_group(self, group, medium, places=None):
        """Return the same for one kind besides KV: the ends of its states, or all pages of its rows."""
        kind, field = group.partition(":")[0], {GPU: "value", CPU: "host_value"}.get(medium)
        if field is None:
            return set()
        found = set()
        for place in self.walk() if places is None else places:
            data = self.data(place.node, kind)
            is_copied = medium is CPU and (data.pending_id is not None or is_pending(place.node))
            if getattr(data, field) is not None and not is_copied:
                prefixes = place.prefixes[-1:] if kind == "mamba" else place.prefixes
                found |= {(place.extra_key, raw) for raw in prefixes}
        return found

    def up(self, node):
        while node is not self.cache.root_node:
            yield node
            node = node.parent

    def check(self):
        """Recount everything and check every number that is not being copied."""
        rows, slots = [], [req.mamba_pool_idx for req in self.requests]
        if self.served is not None:
            rows, slots = self.served.owned_rows(), slots + self.served.owned_slots()
        check_cache(self.cache, np.concatenate([no_indices(), *rows]), np.concatenate([no_indices(), *slots]))
        self.check_bytes()

    def check_bytes(self):
        loads = list(self.cache.ongoing_load_back.values())
        loading = {step for node in loads for step in self.up(node)}
        for place in self.walk():
            if place.node not in loading:
                self._check_rows(place, "value")
            if not is_pending(place.node):
                self._check_rows(place, "host_value")
        for req, (node, content) in self.loaded.items():
            if node not in loads:
                self.pools[PoolName.MAMBA].check_device(req.mamba_pool_idx, content)

    def _check_rows(self, place, field):
        for kind, pool in POOLS.items():
            data = self.data(place.node, kind)
            rows = getattr(data, field)
            if rows is None or (field == "host_value" and getattr(data, "pending_id", None) is not None):
                continue
            pools, prefixes = self.pools[pool], place.prefixes[-1:] if kind == "mamba" else place.prefixes
            check = pools.check_device if field == "value" else pools.check_host
            check(rows, contents(place.extra_key, prefixes, pool.value))


def is_pending(node):
    return node.write_through_pending_id is not None
