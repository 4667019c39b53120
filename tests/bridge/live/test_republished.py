"""Events that a bridge sends on, as a second bridge and NVIDIA Dynamo's indexer understand them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bridge.republisher import RepublishError, complete_batch
from bridge.settings import EngineSettings
from tests.rigs.bridge import LiveBridge, bridged, pages, prompt, store
from tests.support.engines.event_payloads import MASK64, cleared, payload, removed, stored
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.servers.child_process import free_port
from tests.support.servers.peer_indexer import PeerIndexer
from tests.support.waiting import async_wait_until


@asynccontextmanager
async def republished(**engine: Any) -> AsyncIterator[tuple[ZmqEngine, LiveBridge, dict[str, str]]]:
    """An engine, the bridge that reads it and sends its events on, and the addresses of these."""
    ports = free_port(), free_port()
    to = {"republish": f"tcp://*:{ports[0]}", "republish_replay": f"tcp://*:{ports[1]}"}
    at = {"endpoint": f"tcp://127.0.0.1:{ports[0]}", "replay_endpoint": f"tcp://127.0.0.1:{ports[1]}"}
    async with bridged(read=to, **engine) as (sender, bridge):
        yield sender, bridge, at


@asynccontextmanager
async def reader_of(at: dict[str, Any]) -> AsyncIterator[LiveBridge]:
    async with LiveBridge(bridge_idle_check_s=0.2) as reader:
        await reader.fleet.add(EngineSettings(worker="w", model="m", block_size=4, **at))
        yield reader


@pytest.mark.parametrize(
    "unreadable",
    [
        b"\xc1 no msgpack",
        payload(removed(["x"])),
        payload(stored([9], ["x"] * 4)),
        payload(7),
        payload("text"),
        payload({"type": "BlockEvicted", "block_hashes": [1]}, form="map"),
        msgspec.msgpack.encode([1.0, {"a": 1}]),
        msgspec.msgpack.encode("abc"),
    ],
    ids=["no msgpack", "a hash", "a token", "an event", "text", "a type", "events", "no batch"],
)
async def test_readers_see_what_the_bridge_sees_and_miss_nothing(unreadable: bytes) -> None:
    async with republished(replay=False) as (engine, bridge, at):
        engine.send(store(0))
        engine.send(store(1))
        await bridge.shows(pages(0, 1))
        async with reader_of(at) as reader:  # which came late
            await reader.shows(pages(0, 1))
            engine.send(payload(removed([0])))
            await reader.shows(pages(1))
            engine.send(store(2), "lost")
            engine.send(store(3))
            await reader.shows(pages(3))
            engine.send(unreadable)
            engine.send(store(4))
            await reader.shows(pages(4))
            engine.send(payload(cleared(), stored([5], prompt(5))))
            await reader.shows(pages(5))
            await asyncio.to_thread(engine.restart)
            await reader.shows(set())
            engine.send(store(6))
            await reader.shows(pages(6))
            await reader.degrades("")
            counters = reader.counters()
            assert (counters["restarts"], counters["losses"], counters["undecodable"]) == (0, 0, 0)
            await bridge.fleet.remove("w")
            await reader.shows(set())


async def test_batches_that_are_no_longer_kept_count_as_a_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.republisher._MAX_KEPT", 3)
    monkeypatch.setattr("bridge.republisher._RECONNECT_S", 0)
    async with republished() as (engine, bridge, at):
        for number in range(5):
            engine.send(store(number))
        await bridge.shows(pages(*range(5)))
        async with reader_of(at) as reader:
            await reader.shows(pages(2, 3, 4))
            assert reader.counters()["losses"] == 0


async def test_a_restart_of_the_bridge_is_seen_by_its_readers() -> None:
    with ZmqEngine(replay=False) as engine:
        port, replay = free_port(), free_port()
        to = {"republish": f"tcp://127.0.0.1:{port}", "republish_replay": f"tcp://127.0.0.1:{replay}"}
        at = {"endpoint": f"tcp://127.0.0.1:{port}", "replay_endpoint": f"tcp://127.0.0.1:{replay}"}
        async with reader_of(at) as reader:
            for number in range(3):
                async with LiveBridge() as bridge:
                    await bridge.read(engine, **to)
                    await reader.shows(set())  # not those of the bridge before
                    engine.send(store(number))
                    await reader.shows(pages(number))


def test_dynamo_loses_nothing_and_forgets_an_engine_that_restarts(tmp_path: Path) -> None:
    tokens = prompt(0)

    def scores(peer: PeerIndexer) -> Any:
        return peer.query(model_name="m", token_ids=tokens)["scores"]

    async def follow(peer: PeerIndexer) -> None:
        async with republished() as (engine, bridge, at):
            engine.send(store(0, rank=3))  # which its address does not have, so that clears would not concern it
            await async_wait_until(lambda: bridge.view(rank=3).pages == pages(0))
            await asyncio.to_thread(peer.register, 1, model_name="m", block_size=4, **at)
            await async_wait_until(lambda: scores(peer) == {"1": {"0": 4}}, what="Dynamo to know the page")
            await asyncio.to_thread(engine.restart)
            await async_wait_until(lambda: not scores(peer), what="Dynamo to forget the page")
            engine.send(store(0))
            await async_wait_until(lambda: scores(peer) == {"1": {"0": 4}}, what="Dynamo to know the page again")

    with PeerIndexer(tmp_path / "dynamo.log") as peer:
        asyncio.run(follow(peer))


STORED = {
    "type": "BlockStored",
    "block_hashes": [7, MASK64],
    "parent_block_hash": 5,
    "token_ids": list(range(8)),
    "block_size": 4,
    "lora_id": None,
    "medium": None,
    "lora_name": None,
}
PLAIN = stored([7, -1], list(range(8)), parent=5)


@pytest.mark.parametrize(
    ("batch", "events"),
    [
        (payload(PLAIN), [STORED]),
        (payload(PLAIN, form="map"), [STORED]),
        (payload(PLAIN, batch="map"), [STORED]),
        (payload(PLAIN, batch="pair"), [STORED]),
        (payload(PLAIN | {"group_idx": 1}), [STORED | {"extra_keys": None, "group_idx": 1}]),
        (payload(stored([bytes(31) + b"\7", -1], range(8), parent=b"\5"), form="map"), [STORED]),
        (payload(PLAIN | {"session_id": "s"}, form="map"), [STORED | {"session_id": "s"}]),
        (payload(PLAIN | {"lora_name": {"cache_salt": "x"}}), [STORED | {"cache_salt": "x"}]),
        (payload(removed([-1])), [{"type": "BlockRemoved", "block_hashes": [MASK64], "medium": None}]),
        (payload(cleared()), [{"type": "AllBlocksCleared"}]),
    ],
)
def test_events_of_all_engines_become_complete_maps(batch: bytes, events: list[dict[str, Any]]) -> None:
    assert msgspec.msgpack.decode(complete_batch(batch)) == [1.5, events, None]


async def test_an_address_in_use_is_an_error_and_the_engine_can_be_added_later() -> None:
    async with republished() as (engine, _, at), LiveBridge() as other:
        ranks: dict[str, Any] = {"worker": "w", "model": "m", "endpoint": engine.endpoint, "num_ranks": 2}
        port = int(at["endpoint"].rpartition(":")[2])
        wanted = EngineSettings(**ranks, republish=f"tcp://*:{port - 1}")  # that of the second rank is in use
        with pytest.raises(RepublishError, match=r"engine w rank 1: republish.*in use"):
            await other.fleet.add(wanted)
        assert not other.fleet.status()
        assert await other.fleet.add(EngineSettings(**{**ranks, "num_ranks": 1}, republish=f"tcp://*:{free_port()}"))
        await asyncio.to_thread(engine.wait_for_readers)
        engine.send(store(0))
        await other.shows(pages(0))
