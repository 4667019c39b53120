"""The kinds of state of a model, and their rules for matches, inserts, eviction, locks, splits and transfers.

Components own the data of their kind at the nodes of a tree, and its LRU lists. Imports `tree` and the interfaces of
pools. Start at `component.py`.
"""
