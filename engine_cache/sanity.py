"""A recount of what a tree and its components keep up to date: tiers, locks, sizes, leaves and LRU lists."""

from collections.abc import Iterable, Sequence

from engine_cache.components.component import AuxiliaryComponent
from engine_cache.errors import CacheStateError
from engine_cache.tree.node import TreeNode, iter_nodes
from engine_cache.tree.tree import RadixTree


def require(found: object, expected: object, what: str) -> None:
    """Raise CacheStateError with both values if they differ."""
    if found != expected:
        raise CacheStateError(f"{what}: {found} != {expected}")


def check_tree(tree: RadixTree, components: Sequence[AuxiliaryComponent]) -> None:
    nodes = list(iter_nodes(tree.root))
    for node in nodes:
        _check_node(node, tree.root)
    on_device = [node for node in nodes if node.value is not None]
    _check_sizes(tree, [(node.lock_ref, len(node.key)) for node in on_device], "size, units")
    above = {node.parent for node in on_device}
    leaves = [node for node in on_device if node.lock_ref == 0 and node not in above]
    _check_listed(tree.device_leaves, leaves, "evictable leaves")
    tree.device_leaves.check()
    if tree.has_host:
        _check_listed(tree.host_leaves, [node for node in nodes if _is_host_leaf(node)], "evictable host leaves")
        tree.host_leaves.check()
    for component in components:
        _check_component(component, nodes)


def _check_node(node: TreeNode, root: TreeNode) -> None:
    parent = node.parent
    assert parent is not None
    require(node.value is None and node.host_value is None, False, f"node {node.id} is on no tier")
    require(node.lock_ref >= 0, True, f"node {node.id}: lock_ref {node.lock_ref} is not negative")
    if parent is not root:
        require(node.value is None or parent.value is not None, True, f"node {node.id} and its parent on the device")
        locks = f"lock_ref {node.lock_ref} of node {node.id}, {parent.lock_ref} of its parent"
        require(parent.lock_ref >= node.lock_ref, True, locks)


def _is_host_leaf(node: TreeNode) -> bool:
    is_below = any(child.host_value is not None for child in node.children.values())
    return node.value is None and node.host_ref_counter == 0 and not is_below


def _check_component(component: AuxiliaryComponent, nodes: list[TreeNode]) -> None:
    name, sizes = component.pool.value, []
    for node in nodes:
        data = component.data(node)
        require(data.value is None or node.value is not None, True, f"node {node.id}: {name} beside KV on the device")
        require(data.host_value is None or node.host_value is not None, True, f"node {node.id}: {name} beside KV there")
        locks = f"node {node.id}: 0 <= {name}_lock_ref <= lock_ref, {data.lock_ref, node.lock_ref}"
        require(0 <= data.lock_ref <= node.lock_ref and data.host_lock_ref >= 0, True, locks)
        if data.value is not None:
            sizes.append((data.lock_ref, len(data.value)))
    _check_sizes(component, sizes, f"{name} rows, those")
    on_device = [node for node in nodes if component.data(node).value is not None]
    _check_listed(component.device_lru_list, on_device, f"{name} list")
    _check_listed(component.host_lru_list, filter(component.is_on_host_list, nodes), f"{name} host list")


def _check_sizes(kept: RadixTree | AuxiliaryComponent, found: Iterable[tuple[int, int]], what: str) -> None:
    sizes = [0, 0]
    for lock_ref, size in found:
        sizes[lock_ref > 0] += size
    require(kept.evictable_size, sizes[0], f"evictable {what} in unlocked nodes")
    require(kept.protected_size, sizes[1], f"protected {what} in locked nodes")


def _check_listed(listed: Iterable[TreeNode], expected: Iterable[TreeNode], what: str) -> None:
    require(sorted(node.id for node in listed), sorted(node.id for node in expected), f"{what}: nodes listed, found")
