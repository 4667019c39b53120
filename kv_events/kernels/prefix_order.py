"""The order of pages along their prefixes: each parent before its children."""

import numpy as np
import numpy.typing as npt

from kv_events.hashing import U64Array
from kv_events.kernels.bundles import I64Matrix, I64Vector
from kv_events.kernels.declare import kernel

_SEEN = -2


def prefix_order(hashes: U64Array, parents: U64Array) -> npt.NDArray[np.int64]:
    """Return an order of pages in which each parent precedes its children, directly if possible.

    hashes: uint64[n], distinct. parents: uint64[n], 0 for none; others that are not in `hashes` are ignored. Returns
    int64[n], indices. A cycle of parents, which only a faulty publisher sends, is cut at an arbitrary page.
    """
    order, links = np.empty(len(hashes), np.int64), np.full((2, len(hashes)), -1, np.int64)
    _walk_down(_parent_indices(hashes, parents), links, np.empty(len(hashes) + 1, np.int64), order)
    return order


def _parent_indices(hashes: U64Array, parents: U64Array) -> npt.NDArray[np.int64]:
    """Return the index of each page's parent, or -1.

    Most parents are in front of their child, or behind it where a prompt took entries that were freed last page first.
    """
    indices = np.full(len(hashes), -1, np.int64)
    in_front = np.flatnonzero((hashes[:-1] == parents[1:]) & (parents[1:] != 0))
    indices[in_front + 1] = in_front
    behind = np.flatnonzero((hashes[1:] == parents[:-1]) & (parents[:-1] != 0))
    indices[behind] = behind + 1
    others = np.flatnonzero((indices < 0) & (parents != 0))
    if len(others):
        by_hash = np.argsort(hashes)
        in_order = hashes[by_hash]  # a search through a sorter would read memory at random
        places = np.minimum(np.searchsorted(in_order, parents[others]), len(hashes) - 1)
        is_held = in_order[places] == parents[others]
        indices[others[is_held]] = by_hash[places[is_held]]
    return indices


@kernel
def _walk_down(parents: I64Vector, links: I64Matrix, stack: I64Vector, order: I64Vector) -> None:
    """Write all pages to `order`.

    parents: int64[n], index of the parent, or -1; _SEEN once the page is in the order. links: int64[2, n], filled with
    -1; first child and next sibling of each page. stack: int64[n + 1], scratch space. order: int64[n].
    """
    n = parents.shape[0]
    first_child, next_sibling = links[0], links[1]
    for i in range(n):
        if parents[i] >= 0:
            next_sibling[i] = first_child[parents[i]]
            first_child[parents[i]] = i
    count = 0
    for take_all in (False, True):  # first from the roots down; what remains is on or below a cycle
        for root in range(n):
            if parents[root] == _SEEN or (parents[root] >= 0 and not take_all):
                continue
            height = 1
            stack[0] = root
            while height > 0:
                height -= 1
                entry = stack[height]
                if parents[entry] == _SEEN:
                    continue
                parents[entry] = _SEEN
                order[count] = entry
                count += 1
                child = first_child[entry]
                while child >= 0:
                    stack[height] = child
                    height += 1
                    child = next_sibling[child]
