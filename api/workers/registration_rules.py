"""Rules for registrations: allowed addresses, conflicts, and the ranks that a caller selects."""

import asyncio
import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import TypeAlias

from api.problems import ProblemError, ProblemKind
from api.selection.answers import worker_name
from api.workers.allowed_addresses import AddressRefusedError, AllowedAddresses
from api.workers.reports import place_of
from bridge import EngineSettings
from kv_events.engine_wire import LocateError, has_wildcard
from kv_events.errors import InvalidValueError, shorten
from kv_events.http.workers import WorkerRecord
from kv_events.runtime.outages import RateLimitedLogger
from kv_events.streams import StreamId

_limited_logger = RateLimitedLogger(logging.getLogger(__name__), "registrations")

Engines: TypeAlias = Mapping[StreamId, EngineSettings]

_GREETING_S = 1.0
_SILENCE_S = 0.2
"""A peer that says nothing for so long is asked whether it speaks HTTP."""

# restricted to addresses that ZMQ can connect to, so that it does not retry forever
_TCP = re.compile(r"tcp://(?:[A-Za-z0-9][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?\]):[0-9]{1,5}")
_IPC = re.compile(r"ipc://[A-Za-z0-9_./-][A-Za-z0-9_./@-]{0,99}|ipc://@[A-Za-z0-9_./@-]{1,99}")


async def check_addresses(engine: EngineSettings, allowed: AllowedAddresses) -> None:
    """Check that an engine's addresses are valid and allowed. Raises ProblemError (400, 403).

    A host name may be unknown, because an engine may be registered before it runs.
    """
    metrics = None if engine.metrics_url is None else f"tcp://{place_of(engine.metrics_url)}"
    places = {"endpoint": engine.endpoint, "replay_endpoint": engine.replay_endpoint, "metrics_url": metrics}
    for field, address in places.items():
        if address is None:
            continue
        if not (_TCP.fullmatch(address) or _IPC.fullmatch(address)) or has_wildcard(address):
            expected = "the engine's own address, tcp://HOST:PORT; this service binds none"
            raise ProblemError.of_value(InvalidValueError(field, address, expected), 400, ProblemKind.INVALID_ENDPOINT)
        try:
            await allowed.locate(address)
        except AddressRefusedError as error:
            raise ProblemError(403, ProblemKind.ENDPOINT_NOT_ALLOWED, f"{field}: {error}", field, address) from None
        except LocateError as error:
            _limited_logger.warning("worker %s is registered all the same: %s", shorten(engine.worker), error)


async def check_speaks_zmq(engine: EngineSettings, allowed: AllowedAddresses) -> None:
    """Check that no HTTP server answers at an engine's addresses. Raises ProblemError (400).

    A ZMQ socket greets first, so this takes as long as a connection. What does not answer may start later.
    """
    for field in ("endpoint", "replay_endpoint"):
        address: str | None = getattr(engine, field)
        if address is None or not address.startswith("tcp://"):
            continue
        try:
            host, _, port = (await allowed.locate(address)).removeprefix("tcp://").rpartition(":")
            async with asyncio.timeout(_GREETING_S):
                answers = await _speaks_http(host.strip("[]"), int(port))
        except (OSError, TimeoutError, LocateError):
            continue
        if answers:
            expected = "the port of the engine's ZMQ events; an HTTP server answers here"
            raise ProblemError.of_value(InvalidValueError(field, address, expected), 400, ProblemKind.INVALID_ENDPOINT)


async def _speaks_http(host: str, port: int) -> bool:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(_SILENCE_S):
                return await reader.read(5) == b"HTTP/"
        writer.write(b"HEAD / HTTP/1.0\r\n\r\n")
        return await reader.read(5) == b"HTTP/"
    finally:
        writer.close()


def check_conflicts(engines: Engines, engine: EngineSettings, *, is_peer: bool) -> None:
    """Check that an engine contradicts no registered one. is_peer: also apply Dynamo's rules.

    Raises ProblemError (409).
    """
    stream = stream_of(engine)
    if stream in engines:
        raise _conflict(f"instance {engine.worker} dp_rank {engine.dp_rank} already registered", engine)
    for held, settings in engines.items():
        served = f"model={held.model} routing_group={held.tenant}"
        is_same_worker = held.worker == stream.worker and (is_peer or held.tenant == stream.tenant)
        if is_same_worker and (held.model, held.tenant) != (stream.model, stream.tenant):
            raise _conflict(f"instance {engine.worker} is already registered for {served}", engine)
        is_same_namespace = (held.model, held.tenant) == (stream.model, stream.tenant)
        is_known = None not in (settings.block_size, engine.block_size)
        if is_peer and is_same_namespace and is_known and settings.block_size != engine.block_size:
            sizes = f"existing={settings.block_size}, requested={engine.block_size}"
            raise _conflict(f"block_size mismatch for {served}: {sizes}", engine)


def select_ranks(
    engines: Engines, worker: str, model: str, tenant: str | None, dp_rank: int | None
) -> dict[StreamId, EngineSettings]:
    """Return the ranks that a caller unregisters, at least one. Raises ProblemError (404)."""
    of_worker = {s: e for s, e in engines.items() if s.worker == worker and tenant in (None, s.tenant)}
    if not of_worker:
        raise _unknown(f"instance {worker} not found", worker)
    of_model = {stream: engine for stream, engine in of_worker.items() if stream.model == model}
    if not of_model:
        other = next(iter(of_worker))
        raise _unknown(f"instance {worker} is registered for model={other.model} routing_group={other.tenant}", worker)
    selected = {stream: engine for stream, engine in of_model.items() if dp_rank in (None, stream.dp_rank)}
    if not selected:
        raise _unknown(f"instance {worker} dp_rank {dp_rank} not found", worker)
    return selected


def no_room(detail: str, engine: EngineSettings, status: int = 409) -> ProblemError:
    """Return the problem of a reached limit."""
    return ProblemError(status, ProblemKind.TOO_MANY_REGISTRATIONS, detail, "instance_id", engine.worker)


def stream_of(engine: EngineSettings) -> StreamId:
    """Return the identity of a rank. An address with self-named workers is known by its endpoint."""
    return StreamId(engine.model or "", engine.tenant, engine.worker or engine.endpoint, engine.dp_rank)


def record_of(engine: EngineSettings) -> WorkerRecord:
    """Return the record of an engine that the operator has named."""
    return WorkerRecord(
        worker_id=worker_name(engine.worker or ""),
        model_name=engine.model or "",
        routing_group=engine.tenant,
        endpoint=engine.url,
        block_size=engine.block_size,
        data_parallel_start_rank=engine.dp_rank,
        data_parallel_size=engine.num_ranks,
    )


def _conflict(detail: str, engine: EngineSettings) -> ProblemError:
    return ProblemError(409, ProblemKind.ALREADY_REGISTERED, detail, "instance_id", engine.worker)


def _unknown(detail: str, worker: str) -> ProblemError:
    return ProblemError(404, ProblemKind.UNKNOWN_WORKER, detail, "instance_id", worker)
