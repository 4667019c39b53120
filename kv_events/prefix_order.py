"""The order of pages along their prefixes: each parent before its children."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from kv_events.bundles import I64Input, I64Vector
from kv_events.hashing import U64Array
from kv_events.kernels import array_kernel


def prefix_order(hashes: U64Array, parents: U64Array) -> npt.NDArray[np.int64]:
    """Return an order of pages in which each parent precedes its children, directly if possible.

    hashes: uint64[n], distinct. parents: uint64[n], 0 for none; others that are not in `hashes` are ignored. Returns
    int64[n], indices. A cycle of parents, which only a faulty publisher sends, is cut at an arbitrary page.
    """
    order = np.empty(len(hashes), np.int64)
    if len(hashes):
        by_hash = np.argsort(hashes)
        entries = by_hash[np.minimum(np.searchsorted(hashes, parents, sorter=by_hash), len(hashes) - 1)]
        _walk_down(np.where((hashes[entries] == parents) & (parents != 0), entries, -1), order)
    return order


@array_kernel(types.void, I64Input, I64Vector, allocates=True)
def _walk_down(parents, order):
    """Write all pages to `order`. parents: int64[n], index of the parent, or -1. order: int64[n]."""
    n = parents.shape[0]
    first_child = np.full(n, -1, np.int64)
    next_sibling = np.full(n, -1, np.int64)
    for i in range(n):
        if parents[i] >= 0:
            next_sibling[i] = first_child[parents[i]]
            first_child[parents[i]] = i
    seen = np.zeros(n, np.bool_)
    stack = np.empty(n + 1, np.int64)
    count = 0
    for take_all in (False, True):  # first from the roots down; what remains is on or below a cycle
        for root in range(n):
            if seen[root] or (parents[root] >= 0 and not take_all):
                continue
            height = 1
            stack[0] = root
            while height > 0:
                height -= 1
                entry = stack[height]
                if seen[entry]:
                    continue
                seen[entry] = True
                order[count] = entry
                count += 1
                child = first_child[entry]
                while child >= 0:
                    stack[height] = child
                    height += 1
                    child = next_sibling[child]
