"""A radix tree: its keys and nodes, LRU order, eviction order, and the events of its changes.

Owns the shape of the tree. Nodes contain rows; other data belongs to components. Start at `key.py` and `node.py`.
"""
