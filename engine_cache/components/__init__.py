"""The kinds of state of a model: what each needs of match, insert, evict, lock, split and transfer.

Owns the data of a kind at the nodes of a tree and their orders of use. Imports `tree` and the interfaces of pools.
Start at `component.py`.
"""
