"""`kvsight bridge` and `kvsight republish`"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kv_events.errors import InvalidValueError
from kv_events.runtime.words import count
from kvsight.cli.shared.console import EngineFile, Engines, Model, UsageError, at_most_one, err
from kvsight.cli.shared.flags import AWAY, BROKER, KAFKA, LOG_LINES, METRICS_PORT, Flag, with_flags
from kvsight.cli.shared.process import allow_open_files, keep_freed_memory, load_kernels, stop_signals

if TYPE_CHECKING:
    from bridge import BridgeSettings, EngineSettings, EngineStatus, Fleet


_FLAGS = {
    "kafka": BROKER,
    "event_log_dir": Flag(Path, "Folder of an event log to write, if there is no Kafka.", True),
    **METRICS_PORT,
    **AWAY,
}


@with_flags(_FLAGS, KAFKA, LOG_LINES)
def bridge(engine: Engines = None, config: EngineFile = None, model: Model = None, *, flags: dict[str, Any]) -> None:
    """Read the KV events of running engines, and publish them.

    The engines are vLLM, SGLang or Mooncake. Message formats are detected. Missed messages are fetched from an engine's
    replay socket as long as it keeps them.

    After the name and the address of --engine, NAME=tcp://HOST:PORT, follow fields of a file: model, replay (a port or
    an address), ranks, dp_rank, block_size, tenant, topic, bind and others. A file has one table [[engines]] for each
    engine. All other settings are KVSIGHT_ variables; see docs/settings.md.

    Example: kvsight bridge --kafka localhost:9092 --model m --engine e0=tcp://gpu-0:5557
    """
    at_most_one({"--kafka": flags["kafka"], "--event-log-dir": flags["event_log_dir"]})
    keep_freed_memory()
    from bridge import Fleet, engines_of
    from publisher import PublisherSettings
    from publisher.sinks import create_sink

    engines = engines_of(config, engine or [], model)
    metrics_port = flags.pop("metrics_port")
    # every stream has a name and a block size of its own
    template = PublisherSettings.from_flags(model="bridge", worker="bridge", dp_rank=0, block_size=1, **flags)
    _run(engines, lambda settings: Fleet(settings, template, create_sink(template)), metrics_port, flags)


@with_flags({**METRICS_PORT, **AWAY}, LOG_LINES)
def republish(engine: Engines = None, config: EngineFile = None, model: Model = None, *, flags: dict[str, Any]) -> None:
    """Send the KV events of engines on to other routers.

    Routers with an index of their own, such as vllm-router and Dynamo, get each batch once and in order, with a replay,
    and a clear where batches are lost or an engine restarts. Engines are given as for kvsight bridge, with two more
    fields: republish, the address to send on, and republish_replay, that of its replay socket. kvsight bridge and serve
    have these fields, too.

    Example: kvsight republish --model m --engine e0=tcp://gpu-0:5557,replay=5558,republish=tcp://*:5600
    """
    keep_freed_memory()
    from bridge import Fleet, engines_of
    from kv_events.log.memory import MemoryLog

    engines = engines_of(config, engine or [], model)
    for each in engines:
        if each.republish is None:
            raise InvalidValueError(f"engine {each.worker or each.endpoint}: republish", None, "tcp://*:PORT")
    metrics_port = flags.pop("metrics_port")
    _run(engines, lambda settings: Fleet.embedded(settings, MemoryLog(1)), metrics_port, flags)


def _run(
    engines: list[EngineSettings],
    new_fleet: Callable[[BridgeSettings], Fleet],
    metrics_port: int | None,
    flags: dict[str, Any],
) -> None:
    import uvloop

    from bridge import BridgeSettings
    from kv_events.runtime.event_loops import new_event_loop

    if not engines:
        raise UsageError("no engine to read: give --engine or --config")
    allow_open_files(0, sum(each.num_files for each in engines))
    settings = BridgeSettings.from_flags(**flags)
    load_kernels()
    uvloop.run(_serve(engines, lambda: new_fleet(settings), metrics_port), loop_factory=new_event_loop)


async def _serve(engines: list[EngineSettings], new_fleet: Callable[[], Fleet], metrics_port: int | None) -> None:
    stop = stop_signals()
    async with new_fleet() as fleet:
        for engine in engines:
            await fleet.add(engine)
        if metrics_port is not None:
            from bridge.metrics import BridgeMetrics
            from publisher.metrics import serve_metrics

            serve_metrics(metrics_port, BridgeMetrics(fleet.status), lambda: _why_not_ready(fleet.status()))
        err.print(f"reading {count(len(fleet.status()), 'stream')} of {count(len(engines), 'engine')}; Ctrl-C stops")
        await stop.wait()
        counters = [status.counters for status in fleet.status()]
    batches, events = sum(c.batches for c in counters), sum(c.events for c in counters)
    err.print(f"stopped after {count(events, 'event')} in {count(batches, 'batch', 'batches')}")


def _why_not_ready(ranks: list[EngineStatus]) -> str:
    """A bridge is ready while it reads an engine at least, and publishes for all that it reads."""
    from bridge import ConnectionState

    publishers = (stream.publisher for rank in ranks for stream in rank.streams if stream.publisher is not None)
    obstacles = [each.obstacle for each in publishers if each.obstacle]
    if not obstacles and not any(rank.state is ConnectionState.CONNECTED and not rank.failure for rank in ranks):
        obstacles = [rank.failure or f"{rank.engine.endpoint}: {rank.state.value}" for rank in ranks]
    return "; ".join(obstacles[:1])
