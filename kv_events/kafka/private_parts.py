"""All uses of private parts of aiokafka, and the request for a topic's id, which aiokafka does not know.

The tests in `tests/kv_events/test_kafka_clients.py` fail when these parts change.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from io import BytesIO
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

from aiokafka import errors
from aiokafka.conn import CloseReason
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.types import Boolean, CompactArray, CompactString, Int16, Int32, Schema, TaggedFields

_STOP_S = 1.0
"""Time for a client to stop, or to end its start."""
_METADATA_PAUSE_S = 0.1
"""Least time between two requests of a client for metadata."""

_unanswered: WeakKeyDictionary[Any, set[asyncio.Future[Any]]] = WeakKeyDictionary()
"""The requests of `_to_its_end` by AIOKafkaClient."""


def inner_client(client: Any) -> Any:
    """Return the AIOKafkaClient of a consumer, a producer or an admin client."""
    return client.client if hasattr(client, "client") else client._client


def adapt(client: Any, fresh_options: Callable[[], dict[str, Any]]) -> None:
    """Change one client in four ways. fresh_options: returns those of its creation, with the present secrets.

    It does not create topics: a broker creates each one that it is asked about, unless the request forbids it. It asks
    for metadata only so often: aiokafka asks without a pause while a topic that it reads does not exist. aiokafka sends
    its requests for metadata, and only these, to what `_get_conn` returns. And it connects with the present content of
    the files, where aiokafka keeps that of its start. A connection that has just been lost is an error of Kafka, see
    `_report_loss`.
    """
    inner = inner_client(client)
    get_connection, next_at = inner._get_conn, 0.0

    async def get_metadata_connection(node: Any, **options: Any) -> Any:
        if not any(kept.connected() for (kept_node, _), kept in inner._conns.items() if kept_node == node):
            fresh = fresh_options()
            inner._ssl_context = fresh.get("ssl_context", inner._ssl_context)
            inner._sasl_plain_password = fresh.get("sasl_plain_password", inner._sasl_plain_password)
        connection = await get_connection(node, **options)
        if connection is None:
            return None
        _report_loss(connection)

        async def send(request: Any) -> Any:
            nonlocal next_at
            await asyncio.sleep(next_at - time.monotonic())
            next_at = time.monotonic() + _METADATA_PAUSE_S
            request._allow_auto_topic_creation = False
            return await connection.send(request)

        return SimpleNamespace(send=send)

    inner._get_conn = get_metadata_connection


def _report_loss(connection: Any) -> None:
    """Let a connection raise KafkaConnectionError if it has just been lost.

    A write then raises RuntimeError under uvloop, which ends aiokafka's fetching or its place in a group for good.
    """
    if "send" in vars(connection):
        return
    send = connection.send

    def send_or_close(request: Any, expect_response: bool = True) -> Any:
        try:
            return send(request, expect_response=expect_response)
        except RuntimeError as error:
            connection.close(reason=CloseReason.CONNECTION_BROKEN)
            raise errors.KafkaConnectionError(f"{error}") from error

    connection.send = send_or_close


async def describe_topics(client: Any, topics: Iterable[str]) -> dict[str, list[list[int]]]:
    """Topic -> the replicas of each of its partitions, in order. Topics that do not exist are missing.

    client: a started client of `KafkaConnection`. Raises KafkaError. aiokafka's own method would create the topics.
    """
    inner = inner_client(client)
    request = MetadataRequest(list(topics), allow_auto_topic_creation=False)
    answer = await _to_its_end(inner, request)
    described = {}
    for found in answer.to_object()["topics"]:
        error = errors.for_code(found["error_code"])
        if error in (errors.NoError, errors.LeaderNotAvailableError):
            parts = sorted(found["partitions"], key=lambda part: part["partition"])
            described[found["topic"]] = [part["replicas"] for part in parts]
        elif error is not errors.UnknownTopicOrPartitionError:
            raise error(found["topic"])
    return described


async def topic_id(client: Any, topic: str) -> bytes | None:
    """Return the 16 bytes that tell a topic from an earlier one of the same name, or None if it does not exist.

    Also None for brokers before version 2.8. client: a started client of `KafkaConnection`. Raises KafkaError.
    """
    inner = inner_client(client)
    try:
        answer = await _to_its_end(inner, _TopicIdRequest(topic))
    except NotImplementedError:
        return None
    found = {name: identity for _, name, identity, *_ in answer.topics}
    identity = found.get(topic, bytes(16))
    return identity if any(identity) else None


async def _to_its_end(inner: Any, request: Any) -> Any:
    """Send a request, which goes on if the caller gives it up, until its client stops.

    Only aiokafka's own time limit, 40 s, closes a connection on which no answers come any longer. Without another
    request, a client whose questions are given up earlier would keep it until the system notices, after 15 minutes.
    """
    asking = asyncio.ensure_future(inner.send(inner.get_random_node(), request))
    asking.add_done_callback(_ignore_outcome)  # later, nobody asks for the error
    unanswered = _unanswered.setdefault(inner, set())
    unanswered.add(asking)
    asking.add_done_callback(unanswered.discard)
    return await asyncio.shield(asking)


async def start_client(client: Any) -> None:
    """Start a client, and stop it if that fails. A cancellation waits a second for the end of the start.

    aiokafka keeps the connection with which it begins open if it is cancelled then.
    """
    starting = asyncio.ensure_future(client.start())
    try:
        await asyncio.shield(starting)
    except BaseException:
        try:
            await asyncio.wait({starting}, timeout=_STOP_S)
        finally:
            await _cancel(starting)
            await stop_client(client)
        raise


async def stop_client(client: Any) -> None:
    """Stop a client and close its connections. A producer flushes for at most a second; later records are dropped.

    Its own `stop` waits until the broker has accepted all records, and that of a consumer can end half-way, in the
    cancellation of its own fetch.
    """
    inner = inner_client(client)
    for request in _unanswered.get(inner, ()):
        request.cancel()  # it could open a connection again
    if not hasattr(client, "stop"):  # an admin client
        await client.close()
    elif not await _stops(client.stop()):
        if hasattr(client, "_sender"):
            await _stops(client._sender.close())
        await _stops(inner.close())


async def _stops(stop: Awaitable[None]) -> bool:
    """Return whether a client stops in time and without an error.

    Over TLS, a connection is closed when the broker confirms it. A second attempt ends in a cancellation, since the
    first one, given up, cancelled the future that both wait for.
    """
    stopping = asyncio.ensure_future(stop)
    await asyncio.wait({stopping}, timeout=_STOP_S)
    if stopping.done() and not stopping.cancelled() and stopping.exception() is None:
        return True
    await _cancel(stopping)
    return False


async def _cancel(task: asyncio.Future[Any]) -> None:
    """Cancel a task, and wait for its end no longer than a second: aiokafka may ignore a cancellation."""
    task.add_done_callback(_ignore_outcome)
    task.cancel()
    await asyncio.wait({task}, timeout=_STOP_S)


def _ignore_outcome(done: asyncio.Future[Any]) -> None:
    if not done.cancelled():
        done.exception()  # it would be logged otherwise


def check_fetching(consumer: Any) -> None:
    """Raise RuntimeError if a started consumer reads no longer. aiokafka only logs that."""
    if consumer._fetcher.error_future.done():
        raise RuntimeError("aiokafka has ended its reading")


# --- version 10 of the request for metadata; aiokafka knows versions up to 5 only ------------------------------------


class _Uuid:
    """Sixteen bytes."""

    @classmethod
    def encode(cls, value: bytes) -> bytes:
        return value

    @classmethod
    def decode(cls, data: BytesIO) -> bytes:
        return data.read(16)


_TEXT = CompactString("utf-8")
_TAGS = ("tags", TaggedFields)
_BROKER = CompactArray(("node_id", Int32), ("host", _TEXT), ("port", Int32), ("rack", _TEXT), _TAGS)
_PARTITION = CompactArray(
    ("error_code", Int16),
    *((name, Int32) for name in ("partition", "leader", "leader_epoch")),
    *((name, CompactArray(Int32)) for name in ("replicas", "isr", "offline_replicas")),
    _TAGS,
)
_TOPIC = CompactArray(
    ("error_code", Int16),
    ("topic", _TEXT),
    ("topic_id", _Uuid),
    ("is_internal", Boolean),
    ("partitions", _PARTITION),
    ("authorized_operations", Int32),
    _TAGS,
)


class _MetadataResponse(Response):  # type: ignore[misc]
    API_KEY, API_VERSION = MetadataRequest.API_KEY, 10
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("brokers", _BROKER),
        ("cluster_id", _TEXT),
        ("controller_id", Int32),
        ("topics", _TOPIC),
        ("authorized_operations", Int32),
        _TAGS,
    )


class _MetadataRequest(RequestStruct):  # type: ignore[misc]
    API_KEY, API_VERSION = _MetadataResponse.API_KEY, _MetadataResponse.API_VERSION
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _MetadataResponse
    SCHEMA = Schema(
        ("topics", CompactArray(("topic_id", _Uuid), ("topic", _TEXT), _TAGS)),
        ("allow_auto_topic_creation", Boolean),
        ("include_cluster_authorized_operations", Boolean),
        ("include_topic_authorized_operations", Boolean),
        _TAGS,
    )


class _TopicIdRequest(Request[_MetadataRequest]):  # type: ignore[misc]
    """Asks about one topic without creating it."""

    API_KEY = _MetadataResponse.API_KEY

    def __init__(self, topic: str) -> None:
        self._topic = topic

    def build(self, request_struct_class: Any) -> _MetadataRequest:
        """Return the request. A hook of aiokafka."""
        request: _MetadataRequest = request_struct_class([(bytes(16), self._topic, {})], False, False, False, {})
        return request
