"""Private parts of aiokafka that kvsight uses in order to stop while the broker is unavailable."""

import asyncio
import inspect
import uuid
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.errors import KafkaConnectionError
from aiokafka.protocol.metadata import MetadataRequest

from kv_events.kafka.connection import KafkaConnection
from kv_events.kafka.private_parts import check_fetching, stop_client
from kv_events.kafka.settings import KafkaSettings
from tests.support.servers.kafka_broker import KafkaBroker

_NOWHERE = "127.0.0.1:1"


@pytest.mark.parametrize(
    ("client", "path"),
    [
        (AIOKafkaConsumer, "_client.close"),
        (AIOKafkaProducer, "_sender.close"),
        (AIOKafkaProducer, "client.close"),
    ],
)
async def test_aiokafka_has_the_private_parts_that_are_used(client: Any, path: str) -> None:
    made = part = client(bootstrap_servers=_NOWHERE)
    for name in path.split("."):
        part = getattr(part, name, None)
    await made.stop()
    where = f"aiokafka {version('aiokafka')} has no coroutine {client.__name__}.{path}"
    assert inspect.iscoroutinefunction(part), f"{where}: adapt kv_events/kafka/private_parts.py"


async def test_aiokafka_has_the_private_fields_that_are_refreshed() -> None:
    consumer = AIOKafkaConsumer(bootstrap_servers=_NOWHERE)
    fields = {"_conns", "_get_conn", "_ssl_context", "_sasl_plain_password"}
    assert fields <= set(dir(consumer._client)), "adapt kv_events/kafka/private_parts.py"
    await consumer.stop()


async def test_a_write_to_a_lost_connection_is_an_error_of_kafka_by_a_failure_put_in(kafka_broker: KafkaBroker) -> None:
    """uvloop raises RuntimeError in the moment between the loss and its report."""

    def fail(_data: bytes) -> None:
        raise RuntimeError("the handler is closed")

    consumer = KafkaConnection(KafkaSettings(kafka=kafka_broker.bootstrap)).consumer()
    await consumer.start()
    await consumer.topics()
    for connection in list(consumer._client._conns.values()):
        connection._writer.write = fail
        with pytest.raises(KafkaConnectionError):
            connection.send(MetadataRequest([]))
    assert await consumer.topics() is not None
    await consumer.stop()


async def test_a_consumer_that_aiokafka_has_given_up_is_noticed(kafka_broker: KafkaBroker) -> None:
    consumer = AIOKafkaConsumer(bootstrap_servers=kafka_broker.bootstrap)
    await consumer.start()
    check_fetching(consumer)
    consumer._fetcher.error_future.cancel()
    await asyncio.wait([consumer._fetcher.error_future])
    with pytest.raises(RuntimeError):
        check_fetching(consumer)
    await consumer.stop()


async def test_clients_that_never_started_stop() -> None:
    await stop_client(AIOKafkaConsumer(bootstrap_servers=_NOWHERE))
    await stop_client(AIOKafkaProducer(bootstrap_servers=_NOWHERE))


@pytest.mark.parametrize("kind", ["consumer", "producer"])
async def test_clients_stop_in_time_with_a_fake_connection_whose_end_is_never_confirmed(
    kafka_broker: KafkaBroker, kind: str
) -> None:
    """Over TLS, a connection is closed when the broker confirms it, which a busy one may do late."""
    made = {"consumer": AIOKafkaConsumer, "producer": AIOKafkaProducer}[kind]
    client = made(bootstrap_servers=kafka_broker.bootstrap)
    await client.start()
    never = asyncio.get_running_loop().create_future()
    connections = (client._client if kind == "consumer" else client.client)._conns
    connections["unconfirmed"] = SimpleNamespace(close=lambda **_: never, connected=lambda: True)
    async with asyncio.timeout(10):
        await stop_client(client)


async def test_clients_of_a_broker_that_is_away_stop_in_time_and_leave_no_task(kafka_broker: KafkaBroker) -> None:
    before = asyncio.all_tasks()
    topic = uuid.uuid4().hex
    producer = AIOKafkaProducer(bootstrap_servers=kafka_broker.bootstrap, enable_idempotence=True)
    await producer.start()
    await producer.send_and_wait(topic, b"first")
    consumer = AIOKafkaConsumer(topic, bootstrap_servers=kafka_broker.bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    await consumer.getone()
    await asyncio.to_thread(kafka_broker.kill)
    pending = await producer.send(topic, b"second")
    async with asyncio.timeout(10):
        await stop_client(consumer)
        await stop_client(producer)
    pending.cancel()
    await asyncio.sleep(0)
    left = {task.get_coro().__qualname__ for task in asyncio.all_tasks() - before}  # type: ignore[union-attr]
    # aiokafka leaves a task that waits for the dropped record; it does nothing else
    assert left <= {"MessageAccumulator.close"}
