"""Snapshots of all views and log positions. A snapshot is written completely or not at all.

`image` converts views to bytes and back; `base` (a folder) and `redis` store the bytes. Start at `base.SnapshotStore`.
"""
