"""`kvsight serve`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kv_events.errors import InvalidValueError
from kv_events.limits import SOCKET_FILES
from kv_events.runtime.variables import variable
from kvsight.cli.allocator import keep_freed_memory
from kvsight.cli.connection_flags import with_service_flags
from kvsight.cli.console import at_most_one, compile_kernels, err, report_compilation
from kvsight.cli.logs import with_log_flags
from kvsight.cli.open_files import allow_open_files
from kvsight.extras import require_serve

if TYPE_CHECKING:
    from api.app import Application
    from api.settings import ApiSettings, RegistrationSettings
    from bridge.settings import BridgeSettings
    from indexer.recording.thread import RecordingThread
    from indexer.settings import IndexerSettings
    from indexer.shards.settings import GroupSettings


@with_log_flags
@with_service_flags
def serve(
    *,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.", envvar="KVSIGHT_PORT")] = None,
    kafka: Annotated[
        str | None, typer.Option(help="Kafka bootstrap servers: HOST:PORT,...", envvar="KVSIGHT_KAFKA")
    ] = None,
    event_log_dir: Annotated[
        Path | None,
        typer.Option(help="Follow an event log in this folder.", envvar="KVSIGHT_EVENT_LOG_DIR"),
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(help="Save snapshots: redis://HOST:PORT/DB", envvar="KVSIGHT_REDIS"),
    ] = None,
    group: Annotated[str | None, typer.Option(help="Share partitions with this group.", envvar="KVSIGHT_GROUP")] = None,
    advertise_url: Annotated[
        str | None, typer.Option(help="Address of this member for the others.", envvar="KVSIGHT_ADVERTISE_URL")
    ] = None,
    connection: dict[str, Any],
) -> None:
    """Run the indexer and its HTTP API.

    Reads the workers' events from Kafka, from an event log, or from engines registered with POST /register. Maintains
    a radix view of each worker and answers POST /query and /query_by_hash. Snapshots and registrations survive a
    restart if they are saved in Redis or in a folder. With --record, everything that routers and engines report is
    also written to an event log, for kvsight replay and explain. With --group, several services share the partitions
    of the topic, and any of them answers for all. Settings without a flag are
    KVSIGHT_ variables; see docs/settings.md.

    Example: kvsight serve --kafka localhost:9092 --redis redis://localhost:6379/0
    """
    at_most_one({"--kafka": kafka, "--event-log-dir": event_log_dir})
    at_most_one({"--redis": redis, "--snapshot-dir": connection["snapshot_dir"]})
    require_serve("kvsight serve")
    from api.settings import ApiSettings, RegistrationSettings
    from bridge.settings import BridgeSettings
    from indexer.settings import IndexerSettings
    from indexer.shards.settings import GroupSettings

    indexer = IndexerSettings.from_flags(kafka=kafka, event_log_dir=event_log_dir, redis=redis, **connection)
    settings = ApiSettings.from_flags(host=host, port=port, **connection)
    shards = GroupSettings.from_flags(group=group, advertise_url=advertise_url, **connection)
    registration = RegistrationSettings.from_flags(**connection)
    bridge = BridgeSettings.from_flags(**connection)
    shards.check(indexer.kafka, reuse_port=settings.reuse_port)
    if settings.reuse_port and indexer.is_embedded:
        expected = "false without --kafka and --event-log-dir: services with engines of their own answer differently"
        raise InvalidValueError(variable("reuse_port"), settings.reuse_port, expected)
    keep_freed_memory()
    engines = registration.max_registrations if indexer.is_embedded else 0
    max_files = allow_open_files(settings.max_connections, engines * 2 * SOCKET_FILES)
    compile_kernels("api.app", *(["indexer.replay"] if settings.record is not None else []))
    from api.server import listen, run_server, url_of

    if indexer.is_embedded:
        bound = listen(settings)
        app = _embedded(indexer, settings, registration, bridge, bound.getsockname()[1], max_files)
    elif shards.group is not None:
        bound = listen(settings)
        app = _member(indexer, settings, shards, url_of(bound, settings))
    else:
        app = _application(indexer, settings)
        bound = listen(settings)
    err.print(f"kvsight listens on {url_of(bound, settings)} (docs at /docs)")
    if indexer.is_embedded:
        err.print("neither --kafka nor --event-log-dir is given: reads engines registered with POST /register")
    run_server(app, settings, bound)


def _application(indexer: IndexerSettings, settings: ApiSettings) -> Application:
    """The application that reads a log."""
    from api.app import create_app
    from indexer.assembly import create_consumer, create_decision_log

    recording = _recording(indexer, settings)
    return create_app(
        create_consumer(indexer, recording=recording),
        settings,
        decisions=create_decision_log(indexer),
        recording=recording,
        event_log=indexer.event_log_dir,
    )


def _recording(indexer: IndexerSettings, settings: ApiSettings) -> RecordingThread | None:
    from indexer.assembly import create_recording

    if settings.record is None:
        return None
    return create_recording(indexer, settings.record, settings.record_keep_s, settings.record_bytes)


def _member(indexer: IndexerSettings, settings: ApiSettings, shards: GroupSettings, url: str) -> Application:
    """The application of a member of a group. url: of its socket."""
    from api.app import create_app
    from api.shards.group import ShardGroup
    from indexer.assembly import create_consumer, create_decision_log
    from indexer.shards.membership import Membership

    membership = Membership(indexer, shards, url)
    recording = _recording(indexer, settings)
    consumer = create_consumer(indexer, recording=recording, membership=membership)
    group = ShardGroup(consumer, membership, shards, settings)
    err.print(f"member of group {shards.group}, which others reach at {membership.url}")
    return create_app(consumer, settings, decisions=create_decision_log(indexer), recording=recording, group=group)


def _embedded(
    indexer: IndexerSettings,
    settings: ApiSettings,
    registration: RegistrationSettings,
    bridge: BridgeSettings,
    port: int,
    max_files: int,
) -> Application:
    """The application that reads engines itself: their events pass through a log in memory. port: of its socket.
    max_files: file descriptors that engines may use.

    The kernels that read engines are loaded while the service answers already.
    """
    from kv_events.kernels.load import import_without_kernels

    load = import_without_kernels("bridge")
    from api.app import create_app
    from api.workers.registrations import Registrations
    from indexer.assembly import create_consumer, create_decision_log, create_store
    from kv_events.log.memory import MemoryLog

    recording = _recording(indexer, settings)
    log = MemoryLog(is_read_once=True, on_record=None if recording is None else recording.recorder.offer)
    consumer = create_consumer(indexer, log, recording)
    store = create_store(indexer, "registrations")
    parts = consumer, log, registration, bridge, store, lambda: report_compilation(load)
    registrations = Registrations(*parts, own_port=port, max_files=max_files)
    return create_app(consumer, settings, registrations, create_decision_log(indexer, recording), recording)
