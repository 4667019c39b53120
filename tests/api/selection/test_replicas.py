"""Two replicas of a service place requests at the same time, through a real broker."""

import asyncio
import uuid
from collections import Counter
from contextlib import AsyncExitStack

from api.app import create_app
from api.service import LiveService
from api.settings import ApiSettings
from indexer.settings import IndexerSettings
from selection.exchange import create_exchange
from selection.settings import SelectionSettings
from tests.rigs.api import asking
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream
from tests.support.waiting import async_wait_until

PROMPT = list(range(1, 161))


async def test_equal_prompts_at_once_split_evenly_over_two_replicas(kafka_bootstrap: str) -> None:
    indexer = IndexerSettings(kafka=kafka_bootstrap, reservations_topic=f"r-{uuid.uuid4().hex}")
    async with AsyncExitStack() as stack:
        clients = []
        for _ in range(2):
            fed, settings = HandFed(), SelectionSettings()
            exchange = create_exchange(indexer, settings.book())
            service = LiveService(fed.consumer, ApiSettings(), selection=settings, reservations=exchange)
            clients.append(await stack.enter_async_context(asking(create_app(service))))
            for worker in ("w0", "w1"):
                await fed.hold(Stream(worker=worker, model="m", block_size=16), PROMPT)
            await async_wait_until(lambda each=exchange: not each.why_not_ready(), 60, "the backlog")  # type: ignore[misc]

        body = {"model_name": "m", "token_ids": PROMPT}
        asked = (clients[number % 2].post("/select_and_reserve", json=body) for number in range(448))
        chosen = [answer.raise_for_status().json() for answer in await asyncio.gather(*asked)]
        counts = Counter(each["worker_id"] for each in chosen)
        assert abs(counts["w0"] - 224) <= 22

        async def know(expected: dict[str, int]) -> bool:
            answers = [(await client.get("/loads")).json()[0]["loads"] for client in clients]
            return all({each["worker_id"]: each["active_requests"] for each in loads} == expected for loads in answers)

        await async_wait_until(lambda: know(dict(counts)), 60, "both replicas to know all 448")
        for client in clients:
            assert (await client.get("/funnel")).json()["all"]["requests"] == 448
        # each is released at the other replica
        for number, each in enumerate(chosen):
            await clients[1 - number % 2].delete(f"/reservations/{each['selection_id']}")
        await async_wait_until(lambda: know({"w0": 0, "w1": 0}), 60, "all to be released")
