"""Creation of a consumer with its source and its snapshot store from settings."""

from __future__ import annotations

from indexer.applier import Applier
from indexer.consumer import Consumer
from indexer.dead_letters import DeadLetters
from indexer.decisions.log import DecisionLog
from indexer.namespaces import Namespaces
from indexer.settings import IndexerSettings
from indexer.snapshots.base import SnapshotStore
from indexer.snapshots.folder import FolderStore
from indexer.sources.base import Source
from indexer.sources.file import FileSource
from indexer.sources.memory import MemorySource
from kv_events.decisions import DECISIONS_FOLDER
from kv_events.memory_log import MemoryLog


def create_consumer(settings: IndexerSettings, log: MemoryLog | None = None) -> Consumer:
    """Create a consumer that is not running yet. log: the log to read in embedded mode.

    A log in memory ends with its process and its writers start from scratch, so views of it are not saved. Clients are
    imported only if the settings need them.
    """
    applier = Applier(Namespaces(settings), DeadLetters(settings.dead_letter_dir))
    store = None if settings.is_embedded else create_store(settings)
    return Consumer(_create_source(settings, log), applier, settings, store)


def create_store(settings: IndexerSettings, what: str = "") -> SnapshotStore | None:
    """Create the store of snapshots, or of another image next to them. Returns None if the settings name no store.

    what: part of the names of files and keys for the other image.
    """
    if settings.redis is not None:
        from indexer.snapshots.redis import RedisStore

        return RedisStore(settings, f"kvsight:{what}") if what else RedisStore(settings)
    if settings.snapshot_dir is not None:
        return FolderStore(settings.snapshot_dir, f"{what}.json") if what else FolderStore(settings.snapshot_dir)
    return None


def create_decision_log(settings: IndexerSettings) -> DecisionLog:
    """Create the log of decisions beside the log of events: a topic of the same broker, or a folder inside the log's.

    An event log has one writer, so the decisions have a log of their own. In embedded mode they are dropped.
    """
    if settings.kafka is not None:
        from indexer.decisions.kafka import KafkaDecisions

        return DecisionLog(KafkaDecisions(settings))
    if settings.event_log_dir is not None:
        from indexer.decisions.file import FileDecisions

        return DecisionLog(FileDecisions(settings.event_log_dir / DECISIONS_FOLDER))
    return DecisionLog(None)


def _create_source(settings: IndexerSettings, log: MemoryLog | None) -> Source:
    if settings.kafka is not None:
        from indexer.sources.kafka import KafkaSource

        has_snapshots = settings.redis is not None or settings.snapshot_dir is not None
        return KafkaSource(settings, settings.snapshot_interval_s if has_snapshots else None)
    if settings.event_log_dir is not None:
        return FileSource(settings.event_log_dir)
    return MemorySource(log or MemoryLog())
