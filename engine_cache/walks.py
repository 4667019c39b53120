"""The two walks of a cache down its tree: matches and inserts."""

from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from engine_cache.base import InsertParams, InsertResult, MatchPrefixParams, MatchResult
from engine_cache.components.component import MatchedPath, num_accepted
from engine_cache.components.mamba import MambaComponent
from engine_cache.requests import Requests
from engine_cache.tiers.backup import Backups
from engine_cache.tiers.device import DeviceTier
from engine_cache.tree.key import RadixKey
from engine_cache.tree.node import TreeNode
from engine_cache.types import IndexArray, no_indices
from kv_events.errors import InvalidValueError


class Walks:
    """The matches and inserts of one cache. states: the component of recurrent states, if there is one."""

    def __init__(self, device: DeviceTier, states: MambaComponent | None, requests: Requests) -> None:
        self.backups: Backups | None = None
        """Set with a host tier."""
        self._device = device
        self._tree = device.tree
        self._variant = device.variant
        self._components = device.components
        self._states = states
        self._requests = requests

    def match(self, key: RadixKey, params: MatchPrefixParams) -> MatchResult:
        nodes, _ = self._tree.descend(key)
        if self.backups is None and not self._components:
            self._tree.touch(nodes)
            last = nodes[-1] if nodes else self._tree.root
            device_rows = np.concatenate([node.value for node in nodes]) if nodes else no_indices()
            return MatchResult(device_rows, last, last, last)
        path = self.usable(nodes)
        best = path.nodes[: path.num_best]
        self._tree.touch(best)
        rows = [node.value for node in best[: path.num_device] if node.value is not None]
        device_node = best[path.num_device - 1] if path.num_device else self._tree.root
        best_node = best[-1] if best else self._tree.root
        if self.backups is not None and self._variant.match_ends_on_host:
            while best_node.host_value is None and best_node.parent is not None:
                best_node = best_node.parent
        units = sum(len(node.key) for node in best[path.num_device :])
        device_rows = np.concatenate(rows) if rows else no_indices()
        result = MatchResult(device_rows, device_node, best_node, best_node, units)
        return self._match_states(result, path, params) if self._components else result

    def usable(self, nodes: list[TreeNode]) -> MatchedPath:
        """Return how far a path can be used, on any tier and on the device."""
        has_host = self.backups is not None
        if has_host:
            nodes = list(takewhile(lambda node: node.value is not None or node.host_value is not None, nodes))
        validators = [each.create_match_validator(not has_host) for each in self._components]
        num_best = num_accepted(nodes, validators) if validators else len(nodes)
        if not has_host:
            return MatchedPath(nodes, num_best, num_best)
        if self._components and self._variant.device_match_needs_states:
            on_device = [each.create_match_validator(match_device_only=True) for each in self._components]
            return MatchedPath(nodes, num_best, num_accepted(nodes, on_device))
        num_device = num_best
        while num_device and nodes[num_device - 1].value is None:
            num_device -= 1
        return MatchedPath(nodes, num_best, num_device)

    def _match_states(self, result: MatchResult, path: MatchedPath, params: MatchPrefixParams) -> MatchResult:
        if self.backups is not None:
            for component in self._components:
                result = component.finalize_match_result(result, path)
        req, states = params.req, self._states
        if states is not None:
            is_reported = self.backups is None or not self._variant.device_match_needs_states
            if is_reported and path.num_best < len(path.nodes):
                cached = sum(len(node.key) for node in path.nodes if node.value is not None)
                usable = sum(len(node.key) for node in path.nodes[: path.num_best])
                result = result._replace(mamba_branching_seqlen=states.branching_seqlen(cached, usable))
            if params.cow_mamba and req is not None:
                best = path.nodes[path.num_best - 1] if path.num_best else self._tree.root
                needed = {best, result.last_device_node} if self._variant.device_match_needs_states else {best}
                self._requests.copy_on_write(req, states.data(best).value, list(needed))
        if req is not None:
            req.swa_host_hit_length = result.swa_host_hit_length
            req.mamba_host_hit_length = result.mamba_host_hit_length
        return result

    def insert(self, key: RadixKey, value: IndexArray | None, params: InsertParams) -> InsertResult:
        """Insert a key of whole pages. value: as in `params`, converted as the key was."""
        if value is None and not self._variant.frees_duplicates:
            value = key.raw.astype(np.int64)
        if value is None or (self._states is not None and len(value) != len(key)):
            rows = 0 if value is None else len(value)
            raise InvalidValueError("value", f"{rows} rows", f"one for each of {len(key)} units in whole pages")
        if not len(key):
            return InsertResult(0, mamba_exist=self._variant.frees_duplicates)
        if not self._components:
            path, matched = self._tree.descend(key)
            self._tree.touch(path)
            return self._insert(key, value, params, path, matched)
        if params.key is not key or params.value is not value or len(value) != len(key):
            value = value[: len(key)]
            params = params._replace(key=key, value=value)
        for component in self._components:
            component.check_insert(params)
        path, matched = self._tree.descend(key, self._touch)
        return self._insert(key, value, params, path, matched)

    def _insert(
        self, key: RadixKey, value: IndexArray, params: InsertParams, path: list[TreeNode], matched: int
    ) -> InsertResult:
        """Insert a key whose first `matched` units are those of the nodes of `path`."""
        self._use(path, params)  # before a component splits a node, because both parts are used
        prefix_len = matched
        if self.backups is not None or self._variant.frees_duplicates:
            prefix_len = self._insert_overlap(path, value, params)
        is_usable = matched == len(key) or not any(
            component.should_skip_leaf_creation(len(key), params) for component in self._components
        )
        if not is_usable:
            self._device.free(value[max(matched, params.prev_prefix_len) :])
            key = key[:matched]
        elif matched < len(key):
            parent = path[-1] if path else self._tree.root
            leaf = self._device.add_leaf(parent, key, value, matched, params.priority)
            for component in self._components:
                component.recover_after_unevict(leaf, matched, params)
            self._use([leaf], params)  # a node that a component splits off above the leaf starts without hits
            path.append(leaf)
        verdicts = [component.finish_insert(path[-1], params) for component in self._components if is_usable]
        if self.backups is not None and path and not params.chunked:
            # last, because a backup copies what the node has at this time
            for node in reversed(self._tree.path_to_root(path[-1])):
                self.backups.back_up_if_due(node)
        return InsertResult(prefix_len, len(key), mamba_exist=not (is_usable and all(verdicts)))

    def _touch(self, node: TreeNode) -> None:
        self._tree.touch_kv([node])
        for component in self._components:
            component.touched_on_insert(node)

    def _use(self, nodes: Sequence[TreeNode], params: InsertParams) -> None:
        counts_evicted = self._variant.counts_hits_of_evicted_nodes
        is_hit = not params.chunked and (self.backups is None or self.backups.counts_hits)
        for node in nodes:
            if params.priority > node.priority:
                node.priority = params.priority
            if is_hit and (counts_evicted or node.value is not None):
                node.hit_count += 1

    def _insert_overlap(self, path: list[TreeNode], value: IndexArray, params: InsertParams) -> int:
        """Insert into existing nodes: nodes on the device keep their rows, the others become owners of the new ones.

        Returns `prefix_len` of the insert.
        """
        start = prefix_len = 0
        for node in path:
            end = start + len(node.key)
            if node.value is None:
                self._device.put(node, value[start:end])
                for component in self._components:
                    component.recover_after_unevict(node, start, params)
                prefix_len += (end - start) * self._variant.counts_evicted_overlap
            else:
                for component in self._components:
                    component.update_on_overlap(node, start, params)
                if self._variant.frees_duplicates and end > params.prev_prefix_len:
                    self._device.free(value[max(start, params.prev_prefix_len) : end])
                prefix_len += end - start
            start = end
        return prefix_len
