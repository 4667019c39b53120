"""Answers of a shard group: a member asks the others and joins their replies.

`members` are the connections, and `wire` has the messages. Start at `scatter_gather.ScatterGather`.
"""
