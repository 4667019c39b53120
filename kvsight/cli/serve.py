"""`kvsight serve`"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kv_events.errors import InvalidValueError
from kv_events.limits import SOCKET_FILES
from kv_events.remedies import REGISTER
from kv_events.runtime.variables import variable
from kv_events.runtime.words import count, names
from kvsight.cli.shared.console import EngineFile, Engines, Model, at_most_one, err
from kvsight.cli.shared.flags import AWAY, BROKER, HTTP, KAFKA, LOG_LINES, REDIS, Flag, with_flags
from kvsight.cli.shared.process import allow_open_files, collector_off, keep_freed_memory, load_kernels
from kvsight.extras import require

if TYPE_CHECKING:
    from socket import socket

    from api.service import LiveService
    from api.settings import ApiSettings, RegistrationSettings
    from bridge.settings import BridgeSettings, EngineSettings
    from indexer.recording.recorder import RecordingThread
    from indexer.settings import IndexerSettings
    from indexer.shards.settings import GroupSettings
    from selection.settings import SelectionSettings


_FLAGS = {
    "host": Flag(str, "Address to listen on: 0.0.0.0 if routers run on other machines."),
    "port": Flag(int, "Port to listen on, if 8000 is taken. 0: any free one.", True),
    "kafka": BROKER,
    "event_log_dir": Flag(Path, "Folder of an event log to follow, if there is no Kafka.", True),
    "redis": Flag(str, "Redis, to start from snapshots: redis://HOST:PORT/DB", True),
    "group": Flag(str, "Group whose members share the partitions, if one service is not enough.", True),
    "advertise_url": Flag(str, "Address of this member, if others cannot reach that of its socket.", True),
    "snapshot_dir": Flag(Path, "Folder, to start from snapshots without Redis."),
    "record": Flag(Path, "Folder of an event log, to replay and explain later what routers saw."),
    "record_keep": Flag(str, "Age after which its files are deleted, if 24h is too short or too long."),
    "record_max_bytes": Flag(str, "Bound on its size, if the disk is small: 20GiB."),
    "dead_letter_dir": Flag(Path, "Folder for records that cannot be decoded, to look into them."),
    "tenant_limits_file": Flag(Path, "TOML file of limits, if tenants share the service."),
    "register_allow": Flag(str, "Where engines may be, if callers are not trusted: 10.0.0.0/16:5557,..."),
    "max_registrations": Flag(int, "Bound on registered engine ranks, for more than 1024."),
    "forget_engine_s": Flag(float, "Seconds until an unreachable engine is unregistered, if it may not come back."),
    **AWAY,
    "policy": Flag(str, "How POST /select chooses, if not by cache and load: lmetric, priority, ..."),
    "predict_s": Flag(float, "Seconds that pages of placed requests count as held, if 2 do not suit. 0: never."),
    "reservation_ttl_s": Flag(float, "Seconds until a reservation expires, if requests last longer than 600."),
    "reuse_port": Flag(bool, "Share the port, if several services of this machine listen on it."),
    "answer_before_ready": Flag(bool, "Answer queries before the log is applied; not, if routers need complete views."),
    "tokenize_url": Flag(str, "Engine that tokenizes, if queries or the page have text: http://HOST:PORT"),
    "tokenizer_file": Flag(Path, "The model's tokenizer.json, if queries have plain text and the engines are busy."),
    "tokenize_timeout_s": Flag(float, "Seconds to wait for tokens, if 0.2 are too few for long chats."),
    "tokenize_at_once": Flag(int, "Texts that are tokenized at the same time, if 16 are too few or too many."),
    "group_deadline_s": Flag(float, "Seconds to wait for another member, if 0.25 are too few under load."),
    "group_session_s": Flag(float, "Seconds of silence before others take over, if members pause longer than 6."),
    "group_token_file": Flag(Path, "File with the token for other members, if they require one."),
    "group_ca_file": Flag(Path, "CAs of the members' certificates, if the system lacks them."),
}


@with_flags(_FLAGS, KAFKA, REDIS, HTTP, LOG_LINES)
def serve(engine: Engines = None, config: EngineFile = None, model: Model = None, *, flags: dict[str, Any]) -> None:
    """Run the indexer and its HTTP API.

    Reads the workers' events from engines, which --engine, --config or `kvsight register` name, from Kafka, or from an
    event log. Maintains a radix view of each worker and answers POST /query and /query_by_hash. Snapshots and
    registrations survive a restart if they are saved in Redis or in a folder. With --record, everything that routers
    and engines report is also written to an event log, for kvsight replay and explain; with Kafka, `kvsight record`
    does the same in a process of its own. With --group, several services share the partitions of the topic, and any of
    them answers for all. Settings without a flag are KVSIGHT_ variables; see docs/settings.md.

    After the name and the address of --engine follow fields of the file, which is that of `kvsight bridge`: model,
    replay (a port or an address), ranks, block_size, tenant and others.

    Example: kvsight serve --model my-model --engine engine-0=tcp://gpu-0:5557,replay=5558
    """
    for name, value in {"--engine": engine or None, "--config": config}.items():
        at_most_one({"--kafka": flags["kafka"], "--event-log-dir": flags["event_log_dir"], name: value})
    at_most_one({"--redis": flags["redis"], "--snapshot-dir": flags["snapshot_dir"]})
    require("serve", "kvsight serve")
    with collector_off():
        from api.settings import ApiSettings, RegistrationSettings
        from bridge.settings import BridgeSettings, engines_of
        from indexer.settings import IndexerSettings
        from indexer.shards.settings import GroupSettings
        from selection.settings import SelectionSettings

    configured = engines_of(config, engine or [], model)
    indexer = IndexerSettings.from_flags(**flags)
    settings = ApiSettings.from_flags(**flags)
    shards = GroupSettings.from_flags(**flags)
    registration = RegistrationSettings.from_flags(**flags)
    selection = SelectionSettings.from_flags(**flags)
    bridge = BridgeSettings.from_flags(**flags)
    shards.check(indexer.kafka, reuse_port=settings.reuse_port)
    if settings.reuse_port and indexer.is_embedded:
        expected = "false without --kafka and --event-log-dir: services with engines of their own answer differently"
        raise InvalidValueError(variable("reuse_port"), settings.reuse_port, expected)
    keep_freed_memory()
    engines = registration.max_registrations if indexer.is_embedded else 0
    max_files = allow_open_files(settings.max_connections, engines * 2 * SOCKET_FILES)
    with collector_off():
        from api.app import create_app
        from api.server import listen, load_and_answer, run_server, url_of
        from indexer.assembly import create_recording

    recording = None
    if settings.record is not None:
        recording = create_recording(indexer, settings.record, settings.record_keep_s, settings.record_bytes)
    if indexer.is_embedded:
        import_module("bridge")  # its kernels are loaded, too
    if settings.reuse_port:
        load_kernels()  # others answer on the port meanwhile
    with listen(settings) as bound:
        load_kernels(lambda: load_and_answer(settings, bound))
        parts = indexer, settings, selection, shards, registration, bridge
        service = _service(*parts, recording, bound, max_files, configured)
        err.print(f"kvsight listens on {url_of(bound, settings)} (docs at /docs)")
        if indexer.is_embedded:
            err.print(_reading(configured))
        run_server(create_app(service), settings, bound)


def _reading(engines: list[EngineSettings]) -> str:
    if not engines:
        return f"no engine is known yet: name one with --engine, or `{REGISTER}`; or read a log with --kafka"
    return f"reads {count(len(engines), 'engine')}: {names([each.worker or each.endpoint for each in engines])}"


def _service(
    indexer: IndexerSettings,
    settings: ApiSettings,
    selection: SelectionSettings,
    shards: GroupSettings,
    registration: RegistrationSettings,
    bridge: BridgeSettings,
    recording: RecordingThread | None,
    bound: socket,
    max_files: int,
    engines: list[EngineSettings],
) -> LiveService:
    """The service that reads a log, or engines itself: their events pass through a log in memory then.

    max_files: file descriptors that engines may use. engines: those of the command line.
    """
    from api.server import url_of
    from api.service import LiveService
    from indexer.assembly import create_consumer, create_queue, create_store
    from indexer.writing.queue import DECISIONS
    from kv_events.log.memory import MemoryLog
    from selection.exchange import create_exchange

    log = membership = group = registrations = None
    if indexer.is_embedded:
        log = MemoryLog(is_read_once=True, on_record=None if recording is None else recording.recorder.offer)
    if shards.group is not None:
        from indexer.shards.membership import Membership

        membership = Membership(indexer, shards, url_of(bound, settings))
    consumer = create_consumer(indexer, log, recording, membership=membership)
    if log is not None:
        from api.workers.registrations import Registrations

        store = create_store(indexer, "registrations", "registrations.json")
        own = {"own_port": bound.getsockname()[1], "max_files": max_files}
        registrations = Registrations(consumer, log, registration, bridge, store, **own, configured=engines)
    if membership is not None:
        from api.shards.group import ShardGroup

        group = ShardGroup(consumer, membership, shards, settings)
        err.print(f"member of group {shards.group}, which others reach at {membership.url}")
    return LiveService(
        consumer,
        settings,
        registrations,
        create_queue(indexer, DECISIONS, recording),
        recording,
        indexer.event_log_dir,
        group,
        selection,
        registration,
        create_exchange(indexer, selection.book(), recording) if group is None else None,
    )
