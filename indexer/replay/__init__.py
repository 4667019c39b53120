"""Replay: what a router saw at any moment, from an event log.

Start at `Timeline`, which opens any moment of a log in a folder, or at `Replay`, which applies records one by one.
`LogIndexer` keeps the key frames and the time index beside a log; `Timeline` works without them, but slowly.
"""

from indexer.replay.frames import KeyFrameError, open_beginning
from indexer.replay.log_indexer import LogIndexer
from indexer.replay.replay import ApplyObserver, Replay
from indexer.replay.timeline import BatchAt, PastRecords, Timeline

__all__ = [
    "ApplyObserver",
    "BatchAt",
    "KeyFrameError",
    "LogIndexer",
    "PastRecords",
    "Replay",
    "Timeline",
    "open_beginning",
]
