"""Snapshots: all views and log positions of one moment, written whole or not at all.

`image` turns views into bytes and back; `folder` and `redis` keep the bytes. Start at `base.SnapshotStore`.
"""
