"""Answers of a shard group: a member asks the others and joins their replies.

`local_shard` replies from a member's own views, `members` are the connections, and `wire` has the messages. Start at
`scatter_gather.ScatterGather`.
"""
