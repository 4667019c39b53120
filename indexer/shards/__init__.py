"""Membership in a shard group: which member of a Kafka consumer group keeps the views of which partitions.

`assignment` shares the partitions out, `membership` follows what the group agreed on. Start at `membership.Membership`.
"""
