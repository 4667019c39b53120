"""Creation of a consumer with its source and its snapshot store from settings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from indexer.applier import Applier, DeadLetters
from indexer.consumer import Consumer
from indexer.namespaces import Namespaces
from indexer.recording.feed import Feed
from indexer.recording.recorder import Recorder, RecordingThread, segment_bytes_within
from indexer.settings import IndexerSettings
from indexer.snapshots.base import SNAPSHOT_NAME, FolderStore, SnapshotStore
from indexer.sources.base import Source
from indexer.sources.file import FileSource
from indexer.sources.memory import MemorySource
from indexer.tenants import TenantGate, TenantLimits
from indexer.writing.queue import DECISIONS, RESERVATIONS, Contents, FolderWriter, WriteQueue
from kv_events.errors import InvalidValueError
from kv_events.kafka.settings import KafkaSettings
from kv_events.log.memory import MemoryLog
from kv_events.records import Channel, LogRecord
from kv_events.runtime.variables import variable

if TYPE_CHECKING:
    from indexer.shards.membership import Membership


def create_consumer(
    settings: IndexerSettings,
    log: MemoryLog | None = None,
    recording: RecordingThread | None = None,
    *,
    membership: Membership | None = None,
) -> Consumer:
    """Create a consumer that is not running yet. log: the log to read in embedded mode. recording: gets dead letters.
    membership: of the group whose members share the partitions; None: the consumer reads all.

    A log in memory ends with its process and its writers start from scratch, so views of it are not saved. Clients are
    imported only if the settings need them.
    """
    limits = None if settings.tenant_limits_file is None else TenantLimits(settings.tenant_limits_file)
    gate = None if limits is None else TenantGate(limits)
    dead_letters = DeadLetters(settings.dead_letter_dir)
    applier = Applier(Namespaces(settings), dead_letters, tenants=gate)
    if recording is not None:
        applier.dead_letters.on_put.append(recording.recorder.offer)
    if membership is not None:
        from indexer.shards.owned_partitions import OwnedPartitions
        from indexer.sources.kafka import KafkaSource

        divisible = KafkaSource(settings, settings.interval_of_snapshots)

        def store_of(partition: int) -> SnapshotStore | None:
            name = f"group-{membership.group}-{partition}"
            return create_store(settings, f"snapshot:{name}", f"{name}.kvsnap")

        owned = partial(OwnedPartitions, membership, divisible, applier, settings, store_of)
        return Consumer(divisible, applier, settings, limits=limits, owned=owned)
    store = None if settings.is_embedded else create_store(settings)
    source = _create_source(settings, log)
    return Consumer(source, applier, settings, store, limits=limits)


def create_store(
    settings: IndexerSettings, key: str = "snapshot", file_name: str = SNAPSHOT_NAME
) -> SnapshotStore | None:
    """Create the store of snapshots, or of another image next to them. Returns None if the settings name no store.

    key, file_name: of the other image, in Redis or in the folder. Raises InvalidValueError if it cannot be a folder.
    """
    if settings.redis is not None:
        from indexer.snapshots.redis import RedisStore

        return RedisStore(settings, f"kvsight:{key}")
    folder = settings.snapshot_dir
    if folder is not None and folder.exists() and not folder.is_dir():
        raise InvalidValueError(variable("snapshot_dir"), str(folder), "a folder")
    return None if folder is None else FolderStore(folder, file_name)


def create_recording(
    settings: IndexerSettings, folder: Path, keep_s: float, max_bytes: int | None = None
) -> RecordingThread:
    """Create what records all topics beside a service, with key frames. In embedded mode the service's own parts offer
    their records.

    keep_s: age in seconds after which whole segments are deleted. max_bytes: bound on the size of the log; None: no
    bound. Raises InvalidValueError for a service that reads an event log, and OSError if there can be no such folder.
    """
    from indexer.replay.log_indexer import indexing

    if settings.event_log_dir is not None:
        expected = f"none with {variable('event_log_dir')}: that folder is a recording already"
        raise InvalidValueError(variable("record"), folder, expected)
    folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(
        folder,
        segment_bytes=segment_bytes_within(max_bytes),
        max_bytes=max_bytes,
        max_age_s=keep_s,
        is_new_run=settings.is_embedded,
    )
    feeds = list if settings.kafka is None else partial(create_feeds, settings)
    return RecordingThread(recorder, feeds, partial(indexing, folder, settings))


def create_feeds(settings: KafkaSettings) -> list[Feed]:
    """Create the feeds of all topics of a deployment."""
    from indexer.sources.kafka import KafkaSource

    topics = {
        Channel.CONTROL: settings.control_topic,
        Channel.DECISIONS: settings.decisions_topic,
        Channel.RESERVATIONS: settings.reservations_topic,
    }
    others = [Feed(KafkaSource(settings, topic=name), channel, name) for channel, name in topics.items()]
    return [Feed(KafkaSource(settings), Channel.EVENTS, settings.events_topic), *others]


def create_queue(settings: IndexerSettings, contents: Contents, recording: RecordingThread | None = None) -> WriteQueue:
    """Create what writes beside the log of events: to a topic of the same broker, or to a folder inside the log's.

    An event log has one writer, so others have a log of their own. In embedded mode, records go to the recording, or
    are dropped.
    """
    if settings.kafka is not None:
        from indexer.writing.kafka import TopicWriter

        topic = {DECISIONS: settings.decisions_topic, RESERVATIONS: settings.reservations_topic}[contents]
        writer: TopicWriter | FolderWriter = TopicWriter(settings, topic)
        return WriteQueue(writer.write, writer.stop, contents=contents)
    if settings.event_log_dir is not None:
        writer = FolderWriter(settings.event_log_dir / contents.name)
        return WriteQueue(writer.write, writer.stop, contents=contents)
    if recording is None:
        return WriteQueue(None, contents=contents)

    async def offer(records: Sequence[LogRecord]) -> None:
        for record in records:
            recording.recorder.offer(record)

    return WriteQueue(offer, contents=contents)


def _create_source(settings: IndexerSettings, log: MemoryLog | None) -> Source:
    if settings.kafka is not None:
        from indexer.sources.kafka import KafkaSource

        return KafkaSource(settings, settings.interval_of_snapshots)
    if settings.event_log_dir is not None:
        return FileSource(settings.event_log_dir)
    return MemorySource(log or MemoryLog())
