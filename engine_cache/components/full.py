"""Full KV, the kind of state that nodes consist of. Its data is in fields of `TreeNode` and follows the rules of the
tree."""

from __future__ import annotations

from typing import ClassVar

from engine_cache.components.component import TreeComponent
from engine_cache.components.match import MatchValidator
from engine_cache.tree.node import ComponentType, TreeNode


class FullComponent(TreeComponent):
    """KV of the full-attention layers. Every tree has it."""

    kind: ClassVar[ComponentType] = ComponentType.FULL

    def create_match_validator(self, match_device_only: bool = False) -> MatchValidator:
        def accepts(node: TreeNode) -> bool:
            return node.value is not None or (node.host_value is not None and not match_device_only)

        return accepts
