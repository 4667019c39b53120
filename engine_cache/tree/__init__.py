"""One radix tree: keys, nodes, orders of use and of eviction, and the events of a change.

Owns the shape of the tree and nothing of what its nodes hold besides rows. Start at `key.py` and `node.py`.
"""
