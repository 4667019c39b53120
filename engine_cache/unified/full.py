"""Full KV in a unified tree: the kind that makes a node. Its data are those of any tree node, its rules the tree's."""

from __future__ import annotations

from typing import ClassVar

from engine_cache.base import MatchPrefixParams, MatchResult
from engine_cache.unified.component import TreeComponent
from engine_cache.unified.match import MatchedPath, MatchValidator
from engine_cache.unified.node import ComponentType, UnifiedNode


class FullComponent(TreeComponent):
    """KV of the full-attention layers; present in every tree."""

    kind: ClassVar[ComponentType] = ComponentType.FULL

    def create_match_validator(self, match_device_only: bool = False) -> MatchValidator:
        def accepts(node: UnifiedNode) -> bool:
            return node.value is not None or (node.host_value is not None and not match_device_only)

        return accepts

    def finalize_match_result(self, result: MatchResult, path: MatchedPath, params: MatchPrefixParams) -> MatchResult:
        """`host_hit_length` is what a load-back adds to the prefix, on whichever tier its KV is now."""
        units = sum(len(node.key) for node in path.nodes[path.num_device : path.num_best])
        return result._replace(host_hit_length=units)
