"""Recordings of real engines, read by a bridge into an index: every score is what the engine reused.

`make engines` makes the recordings, from running servers and from the engine's own block managers.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from api.app import create_app
from api.service import LiveService
from api.settings import ApiSettings
from bridge import BridgeSettings, EngineSettings, Fleet
from indexer.assembly import create_consumer
from indexer.consumer import Consumer
from indexer.settings import IndexerSettings
from kv_events.log.memory import MemoryLog
from publisher import PublisherSettings
from publisher.sinks.memory import MemorySink
from tests.engines.recording import Asked, AskedText, Batch, Header, Restarted, Step, read
from tests.rigs.api import asking
from tests.support.engines.recorded_engine import recorded_engine
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.waiting import async_wait_until

RECORDINGS = sorted((Path(__file__).parents[2] / "data" / "engines").glob("*.rec"))


class Replayed:
    """The engines of a recording, a bridge that reads them, and the index."""

    def __init__(
        self,
        header: Header,
        engines: list[ZmqEngine],
        fleet: Fleet,
        log: MemoryLog,
        consumer: Consumer,
        client: httpx.AsyncClient,
    ) -> None:
        self._header, self._engines, self._fleet, self._client = header, engines, fleet, client
        self._log, self._consumer = log, consumer
        self._num_batches = 0

    async def send(self, batch: Batch) -> None:
        """Let an engine send its next batch."""
        assert self._engines[batch.worker].send(batch.payload) == batch.seq
        self._num_batches += 1

    async def restart(self, worker: int) -> None:
        """Let an engine start again, and wait until the bridge knows it."""
        await async_wait_until(self._is_applied, what="all batches in the index")
        restarts = self._counter("restarts")
        self._engines[worker].restart()
        await async_wait_until(lambda: self._counter("restarts") > restarts, what="the bridge to see the restart")

    async def score(self, asked: Asked) -> int:
        """Return the tokens that the engine can reuse by the index. It always computes the last one."""
        await async_wait_until(self._is_applied, what="all batches in the index")
        body = {"model_name": "m", "token_ids": asked.prompt, **({"cache_salt": asked.salt} if asked.salt else {})}
        return await self._held(asked.worker, body, len(asked.prompt))

    async def score_of_text(self, asked: AskedText) -> int:
        """Return the same of a body as clients of engines send it. Its `model` is the engine's name of the model."""
        await async_wait_until(self._is_applied, what="all batches in the index")
        return await self._held(asked.worker, {"model_name": "m", **msgspec.json.decode(asked.body)}, asked.num_tokens)

    async def _held(self, worker: int, body: dict[str, Any], num_tokens: int) -> int:
        answer = (await self._client.post("/query", json=body)).raise_for_status().json()
        held: int = answer["instances"].get(str(worker), {}).get("longest_matched", 0)
        return min(held, (num_tokens - 1) // self._header.block_size * self._header.block_size)

    def _is_applied(self) -> bool:
        streams = [stream for engine in self._fleet.status() for stream in engine.streams]
        publishers = [stream.publisher for stream in streams if stream.publisher is not None]
        waiting = [each.queued + each.in_flight or not each.next_seq for each in publishers]
        is_sent = self._counter("batches") == self._num_batches and not any(waiting)
        return is_sent and self._consumer.progress.positions.get(0) == self._log.next_offset

    def _counter(self, name: str) -> int:
        return sum(getattr(engine.counters, name) for engine in self._fleet.status())


@asynccontextmanager
async def replayed(header: Header, steps: Sequence[Step]) -> AsyncIterator[Replayed]:
    log = MemoryLog()
    consumer = create_consumer(IndexerSettings(max_pages=2**16), log)
    template = PublisherSettings(model="-", worker="-", block_size=1, linger_ms=0)
    async with AsyncExitStack() as stack:
        settings = ApiSettings(
            tokenize_url=await stack.enter_async_context(recorded_engine(steps)), tokenize_timeout_s=20
        )
        app = create_app(LiveService(consumer, settings))
        client = await stack.enter_async_context(asking(app))
        await async_wait_until(lambda: consumer.ready, what="the index to be ready")
        fleet = await stack.enter_async_context(Fleet(BridgeSettings(), template, MemorySink(log)))
        engines = [stack.enter_context(ZmqEngine()) for _ in range(header.num_workers)]
        for number, engine in enumerate(engines):
            place = {"endpoint": engine.endpoint, "replay_endpoint": engine.replay_endpoint, "worker": str(number)}
            fields = {
                **place,
                "model": "m",
                "block_size": header.block_size,
                **msgspec.to_builtins(header.registration),
            }
            await fleet.add(EngineSettings(**fields))
        await async_wait_until(lambda: len(consumer.namespaces.views) >= len(engines), what="a view of each engine")
        yield Replayed(header, engines, fleet, log, consumer, client)


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
async def test_every_score_is_what_the_engine_reused(path: Path) -> None:
    header, steps = read(path)
    scores = []
    async with replayed(header, steps) as service:
        for step in steps:
            match step:
                case Batch():
                    await service.send(step)
                case Restarted():
                    await service.restart(step.worker)
                case Asked():
                    scores.append((await service.score(step), step.reused))
                case AskedText():
                    scores.append((await service.score_of_text(step), step.reused))
    wrong = [(number, *pair) for number, pair in enumerate(scores) if pair[0] != pair[1]]
    assert len(scores) > 50
    assert not wrong, f"{len(wrong)} of {len(scores)} differ: (number, score, reused) {wrong[:5]}"
