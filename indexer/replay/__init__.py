"""Replay: what a router saw at any moment, from an event log.

Start at `Timeline`, which opens any moment of a log in a folder, or at `Replay`, which applies records one by one.
`LogIndexer` keeps the key frames and the time index beside a log; `Timeline` works without them, but slowly.
"""

from indexer.replay.frames import KeyFrameError as KeyFrameError
from indexer.replay.frames import num_records_before as num_records_before
from indexer.replay.frames import open_beginning as open_beginning
from indexer.replay.log_indexer import LogIndexer as LogIndexer
from indexer.replay.replay import ApplyObserver as ApplyObserver
from indexer.replay.replay import Replay as Replay
from indexer.replay.timeline import BatchAt as BatchAt
from indexer.replay.timeline import PastRecords as PastRecords
from indexer.replay.timeline import Timeline as Timeline
