"""A service on a real port with an embedded bridge."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from api.settings import RegistrationSettings
from api.workers.registrations import Registrations
from bridge import BridgeSettings
from indexer.assembly import create_consumer, create_store
from indexer.settings import IndexerSettings
from kv_events.log.memory import MemoryLog
from tests.rigs.api import served
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.waiting import async_wait_until

TOKENS = list(range(1, 17))


class Service:
    """A running service and a client of it."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def register(self, engine: ZmqEngine, instance: int | str = 1, **fields: Any) -> httpx.Response:
        """Register an engine and wait until the bridge has subscribed. Uses Dynamo's dialect by default."""
        body = {"instance_id": instance, "endpoint": engine.endpoint, "block_size": 4, **fields}
        if "modelname" not in body:
            body["model_name"] = "m"
        answer = await self.client.post("/register", json=body)
        if answer.is_success:
            await asyncio.to_thread(engine.wait_for_readers)
        return answer

    async def gpu(self, tokens: list[int], instance: int | str = 1, **fields: Any) -> int:
        """Return the tokens that an instance holds on its device."""
        answer = await self.client.post("/query", json={"model_name": "m", "token_ids": tokens, **fields})
        return answer.json().get("instances", {}).get(str(instance), {}).get("gpu", 0)  # type: ignore[no-any-return]

    async def holds(self, num_tokens: int, tokens: list[int] = TOKENS, **fields: Any) -> None:
        async def so() -> bool:
            return await self.gpu(tokens, **fields) == num_tokens

        await async_wait_until(so, 60, f"{num_tokens} tokens on the device")

    async def is_ready(self) -> bool:
        return (await self.client.get("/ready")).is_success

    async def workers(self) -> list[tuple[str, str]]:
        """Return the name and the model of each worker."""
        return [(each["instance_id"], each["model_name"]) for each in (await self.client.get("/workers")).json()]

    async def listener(self, rank: int = 0) -> dict[str, Any]:
        """Return the stream of a rank of the only worker, or {} if there is none."""
        (worker,) = (await self.client.get("/workers")).json()
        return worker["listeners"].get(str(rank), {})  # type: ignore[no-any-return]


@asynccontextmanager
async def service(*, registration: Any = None, configured: Any = (), **settings: Any) -> AsyncIterator[Service]:
    indexer = IndexerSettings(max_pages=2**16, **settings)
    log = MemoryLog()
    consumer = create_consumer(indexer, log)
    store = create_store(indexer, "registrations", "registrations.json")
    bridge = BridgeSettings(bridge_name_pages=10_000, bridge_idle_check_s=0.2)
    given = registration or RegistrationSettings()
    registrations = Registrations(consumer, log, given, bridge, store, configured=configured)
    async with served(consumer, registrations=registrations) as client:
        yield Service(client)


@asynccontextmanager
async def reading(
    engine: ZmqEngine | None = None, *, with_replay: bool = False, **fields: Any
) -> AsyncIterator[tuple[Service, ZmqEngine]]:
    """A service that reads an engine. engine: None: a new one. with_replay: it is asked for what was missed, too.

    fields: more of its registration.
    """
    with engine or ZmqEngine() as engine:
        if with_replay:
            fields["replay_endpoint"] = engine.replay_endpoint
        async with service() as served:
            assert (await served.register(engine, **fields)).is_success
            yield served, engine
