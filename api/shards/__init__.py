"""Answers of a shard group: a member asks the others and joins their replies.

`wire` has the messages and the connections. Start at `scatter_gather.ScatterGather`.
"""
