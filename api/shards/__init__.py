"""Answers of a shard group: a member asks the others and joins what they say.

`gather` asks and joins, `own_views` is what a member says of its own views, `peers` are the connections, `wire` is the
form in which members talk. Start at `gather.ScatterGather`.
"""
