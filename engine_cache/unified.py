"""UnifiedRadixCache: one prefix cache for every kind of state, with one to three tiers.

    root ── A ── B* ── C°'     nodes consist of KV; some of them have data of other kinds
                               (*: on the device, °: on the host;  ': KV on the host only)

KV moves as in `HiRadixCache`. Data of the other kinds moves with it in one operation, which succeeds or fails as a
whole. Data of another kind can also be evicted or restored alone, which is not an event. A match ends only where all
kinds can continue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import numpy as np

from engine_cache.base import InitLoadBackParams, Request
from engine_cache.cache import RadixOptions, TreeCache
from engine_cache.components.component import AuxiliaryComponent, TreeComponent
from engine_cache.components.full import FullComponent
from engine_cache.pools.allocators import PagedTokenToKVPoolAllocator
from engine_cache.pools.swa_allocator import SWATokenToKVPoolAllocator
from engine_cache.rules import UNIFIED
from engine_cache.tiers.transfer import HiCacheController
from engine_cache.tree.node import ComponentType, TreeNode, path_down
from engine_cache.types import IndexArray, no_indices
from kv_events.errors import InvalidValueError


class UnifiedRadixCache(TreeCache):
    """A radix tree over pages of KV and the data of further components.

    components: the kinds of state besides Full KV, each at most once; they belong to this cache afterwards. allocator:
    owner of the device rows; with SWA, the allocator of its component. The other options are those of `TreeCache`.
    Without `init_hicache` the device is the only tier. The cache must be reset after a TransferError.
    """

    def __init__(
        self,
        *,
        page_size: int,
        allocator: PagedTokenToKVPoolAllocator | SWATokenToKVPoolAllocator,
        components: Sequence[AuxiliaryComponent] = (),
        **options: Unpack[RadixOptions],
    ) -> None:
        kinds = [ComponentType.FULL, *(component.kind for component in components)]
        if len(set(kinds)) != len(kinds):
            raise InvalidValueError("components", [kind.name for kind in kinds], "each kind once, FULL not named")
        has_swa_rows = isinstance(allocator, SWATokenToKVPoolAllocator)
        if has_swa_rows != (ComponentType.SWA in kinds):
            raise InvalidValueError(
                "allocator", type(allocator).__name__, "one with SWA rows exactly for an SWA component"
            )
        self.token_allocator = allocator
        self.components: tuple[TreeComponent, ...] = (FullComponent(), *components)
        super().__init__(page_size=page_size, allocator=allocator, components=components, rules=UNIFIED, **options)

    def init_hicache(
        self, controller: HiCacheController, write_policy: str = "write_through", load_back_threshold: int = 10
    ) -> None:
        """Add a host tier, once and while the cache is empty.

        controller: moves KV and, as its sidecars, the data of all components; it must use their device allocators.
        write_policy, load_back_threshold: as in `HiRadixCache`.
        """
        if self.host is not None or self.root_node.children:
            raise InvalidValueError("controller", controller, "the first one, before anything is cached")
        self._add_host_tier(controller, write_policy, load_back_threshold)

    def component(self, kind: ComponentType) -> AuxiliaryComponent:
        """Return the component of an auxiliary kind. Raises InvalidValueError if the cache does not have it."""
        for component in self.auxiliaries:
            if component.kind is kind:
                return component
        raise InvalidValueError("kind", kind.name, f"one of {[component.kind.name for component in self.auxiliaries]}")

    def init_load_back(self, params: InitLoadBackParams) -> tuple[IndexArray, TreeNode]:
        """Load back the missing part of a match.

        Returns the rows by which the request's prefix grows, and the node from which it continues. `req.last_node` must
        be the device node of the match, and locked. If nothing was loaded, the request continues there.

        Raises InvalidValueError without a request or if that node is not above the match, and PoolExhaustedError if
        there is no slot for the state that the request starts from.
        """
        node, req = params.best_match_node, params.req
        if req is None or req.last_node is None:
            raise InvalidValueError("req", req, "a request with a last_node")
        start = req.last_node
        added = path_down(node, lambda step: step is not start)
        if node.former_parent is None and (added[0].parent if added else node) is not start:
            raise InvalidValueError("req.last_node", f"node {start.id}", f"a node on the way to node {node.id}")
        is_wanted = node.value is None or params.host_hit_length > 0
        if not is_wanted and req.swa_host_hit_length <= 0 and req.mamba_host_hit_length <= 0:
            return no_indices(), start
        self._copy_state(req, node)  # a state that is on the device already is copied, not loaded
        if self._is_usable(node) and self.load_back(node, params.mem_quota, req) is not None:
            rows = [step.value for step in added if step.value is not None]
            assert len(rows) == len(added), "a node was loaded, but is not on the device"
            return np.concatenate([no_indices(), *rows]), node if rows else start
        self._copy_state(req, start)
        return no_indices(), start

    def _copy_state(self, req: Request, node: TreeNode) -> None:
        if self.states is not None:
            self._requests.copy_on_write(req, self.states.data(node).value, [node])

    def _is_usable(self, node: TreeNode) -> bool:
        """Return whether a match can still end at a node, which may have lost data or been deleted since."""
        if node.former_parent is not None:
            return False
        path = self.tree.path_to_root(node)[::-1]
        return self._matched(path).num_best == len(path)
