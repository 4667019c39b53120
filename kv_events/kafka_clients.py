"""Stops aiokafka's clients in bounded time, whether the broker answers or not.

aiokafka's own `stop` waits for the broker to accept pending records, and a consumer's `stop` can end half-way, in the
cancellation of its own fetch. Only this module uses private parts of aiokafka. The tests in
`tests/unit/kv_events/test_kafka_clients.py` fail when these parts change. The module does not import aiokafka, so that
the contract loads without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

_STOP_S = 1.0
"""Time for a client to stop by itself."""


async def stop_consumer(consumer: Any) -> None:
    """Stop an AIOKafkaConsumer and close its connections."""
    if not await _stops(consumer.stop()):
        await consumer._client.close()


async def stop_producer(producer: Any) -> None:
    """Flush an AIOKafkaProducer for at most a second, then close its connections. Later records are dropped."""
    if not await _stops(producer.stop()):
        await producer._sender.close()
        await producer.client.close()


async def _stops(stop: Awaitable[None]) -> bool:
    """Whether a client stops by itself, in time and without an error."""
    stopping = asyncio.ensure_future(stop)
    await asyncio.wait({stopping}, timeout=_STOP_S)
    if stopping.done() and not stopping.cancelled() and stopping.exception() is None:
        return True
    stopping.cancel()
    await asyncio.gather(stopping, return_exceptions=True)
    return False
