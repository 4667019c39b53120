"""The public names in a process whose own packages are called `api`, `indexer` and so on, like those of kvsight."""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import kvsight
from api.app import create_app
from api.server import running_server
from api.service import LiveService
from api.settings import ApiSettings
from kv_events.codec import StoredPages, decode_batch
from kv_events.log.event_log import EventLogReader
from kv_events.records import LogRecord
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream

pytestmark = pytest.mark.timing("an engine's process must publish within seconds")

ROOT = Path(__file__).resolve().parents[3]
THEIRS = ("api", "indexer", "simulation", "bridge")
OF_ROUTERS = {"kvsight", "kv_events"}
OF_ENGINES = {"kvsight", "kv_events", "engine_cache", "publisher"}
OURS = {*OF_ENGINES, *THEIRS}

ROUTER = """
import asyncio, sys
import numpy as np
from kvsight import (
    AsyncClient, BatchApplied, BatchPosition, Client, ClientClosedError, ClientDropped, Decision, DecisionsAccepted,
    Evidence, Explanation, FeedEvent, Finding, Fleet, FleetRank, FleetWorker, InvalidValueError, KvsightConnectionError,
    KvsightError, KvsightHttpError, Listener, Load, Missing, ModelLoads, Outcome, Overlap, PeerAnswer, PeerInstance,
    PrefillWorker, Prompt, RadixView, RetryPolicy, Selection, Source, StateChange, StateChanged, StorageMedium,
    UnexpectedAnswerError, ViewPage, WeighedCandidate, Worker, WorkerChoice, WorkerExplanation, best_worker,
    rank_workers, sequence_hashes,
)

url, tokens = sys.argv[1], list(range(1, 17))
with Client(url, retry=RetryPolicy(attempts=2)) as client:
    answer = client.query("m", tokens)
    chosen = best_worker(answer, load={"one": 1.0})
    assert isinstance(chosen, WorkerChoice) and (chosen.worker, chosen.tokens) == ("one", 16), chosen
    ranking = rank_workers(answer, load={"one": 1.0})
    decision = Decision("r1", Prompt("m", tokens), "one", predicted_tokens=16, candidates=ranking)
    assert isinstance(client.decided([decision, Outcome("r1", 16)]), DecisionsAccepted)
    try:
        print(client.explain(Prompt("m", tokens)))
    except KvsightHttpError as refusal:
        assert refusal.status == 404, refusal  # this service keeps no log
    assert {BatchPosition, Evidence, Finding, WorkerExplanation} and Explanation.__struct_fields__
    hashes = sequence_hashes(np.array(tokens, np.uint32), 4)
    first, refused = client.query_batch([Prompt("m", seq_hashes=hashes), Prompt("other", tokens)])
    assert isinstance(first, PeerAnswer) and isinstance(first.instances["one"], PeerInstance), first
    assert first.instances["one"].gpu == 16, first
    assert Missing([1], 0.0, "http://b:1", "connection refused") and not first.missing, first  # no shard group
    assert isinstance(refused, KvsightHttpError) and isinstance(refused, KvsightError), refused
    (worker,) = client.workers()
    assert isinstance(worker, Worker) and isinstance(worker.listeners[0], Listener), worker
    assert worker.listeners[0].pages[StorageMedium.GPU.value] == 4, worker
    view = client.view("one")
    assert isinstance(view, RadixView) and all(isinstance(page, ViewPage) for page in view.pages), view
    assert len(view.pages) == 4
    fleet = client.fleet()
    assert isinstance(fleet, Fleet) and isinstance(fleet.workers[0], FleetWorker), fleet
    assert all(isinstance(rank, FleetRank) for rank in fleet.workers[0].ranks), fleet
    assert all(isinstance(change, StateChange) for change in fleet.workers[0].changes), fleet
    assert client.health() and client.ready() and client.dump()
    event = next(client.events())
    assert isinstance(event, StateChanged) and event.state in ("live", "stale"), event  # stale on a slow machine
    assert event.__class__ in (StateChanged, BatchApplied, ClientDropped) and FeedEvent, event
    try:
        client.query("m", [-1])
    except InvalidValueError as error:
        assert error.field == "token_ids[0]" and not isinstance(error, UnexpectedAnswerError), error
    assert client.resync("one") == [worker.endpoints[0]]
    with client.placed("m", tokens, more={"explain": True, "sources": True}) as placed:
        assert isinstance(placed, Selection) and isinstance(placed.overlap, Overlap), placed
        assert isinstance(placed.candidates[0], WeighedCandidate) and not placed.prefill, placed
        assert placed.sources == [], placed
        (loads,) = client.loads()
        assert isinstance(loads, ModelLoads) and isinstance(loads.loads[0], Load), loads
        assert loads.loads[0].active_requests == 1 and Source and PrefillWorker, loads
try:
    client.health()
    raise AssertionError("a closed client answers")
except ClientClosedError:
    pass

async def main():
    async with AsyncClient(url) as client:
        assert (await client.best_worker("m", tokens)).worker == "one"
    try:
        async with AsyncClient("http://127.0.0.1:9", retry=RetryPolicy(attempts=1)) as client:
            await client.workers()
    except KvsightConnectionError:
        return
    raise AssertionError("something answers on port 9")

asyncio.run(main())
"""

ENGINE = """
import asyncio, sys
from pathlib import Path
from kvsight import (
    AllBlocksCleared, BlockRemoved, BlockStored, EventPublisher, FileSink, KafkaSink, KvsightError, PublisherSettings,
    RadixCache, StorageMedium, ZmqSink,
)
from engine_cache import (
    BytelessHostPool, HiCacheController, HiMambaRadixCache, HiRadixCache, HostPoolGroup, HybridCacheController,
    InsertParams, MambaRadixCache, MambaSlotAllocator, ManualCopyEngine, MatchPrefixParams,
    PagedTokenToKVPoolAllocator, PoolEntry, RadixKey, UnifiedRadixCache,
)
from engine_cache.storage import PoolName

folder, tokens = Path(sys.argv[1]), list(range(1, 17))

def cache_of(kind, allocator, slots):
    options = dict(page_size=4, allocator=allocator, enable_kv_cache_events=True)
    kv = PoolEntry(PoolName.KV, BytelessHostPool(256, 4), None, allocator)
    if "Mamba" in kind.__name__:
        options |= dict(mamba_allocator=slots, enable_mamba_extra_buffer=True, mamba_cache_chunk_size=4)
        group = HostPoolGroup.of(kv, PoolEntry(PoolName.MAMBA, BytelessHostPool(32, 1), None, slots))
        if kind is HiMambaRadixCache:
            options["controller"] = HybridCacheController(group, ManualCopyEngine())
    elif kind is HiRadixCache:
        options["controller"] = HiCacheController(kv, ManualCopyEngine())
    return kind(**options)

def serve(kind, publisher):
    allocator, slots = PagedTokenToKVPoolAllocator(64, 4), MambaSlotAllocator(16)
    cache = cache_of(kind, allocator, slots)
    state = slots.alloc(1) if "Mamba" in kind.__name__ else None
    cache.insert(InsertParams(RadixKey(tokens), allocator.alloc(16), mamba_value=state))
    assert len(cache.match_prefix(MatchPrefixParams(RadixKey(tokens))).device_indices) == 16
    publisher.publish(cache.take_events())

for kind in (RadixCache, HiRadixCache, MambaRadixCache, HiMambaRadixCache, UnifiedRadixCache):
    settings = PublisherSettings(model="m", worker=kind.__name__, block_size=4)
    with EventPublisher(settings, FileSink(folder / kind.__name__)) as publisher:
        serve(kind, publisher)
    assert publisher.stats().pages["held"] == 4, publisher.stats()

settings = PublisherSettings(model="m", worker="by-hand", block_size=4, zmq=f"ipc://{folder}/zmq", with_tokens=True)
with EventPublisher(settings, ZmqSink(settings)) as publisher:
    publisher.publish([BlockStored([1, 2], None, tokens[:8], 4, None, StorageMedium.GPU), BlockRemoved([2])])
    publisher.publish([AllBlocksCleared()])
assert not publisher.stats().rejected_events, publisher.stats()

async def to_kafka():
    settings = PublisherSettings(model="m", worker="w", block_size=4, kafka="127.0.0.1:9")
    try:
        await KafkaSink(settings).start()
    except KvsightError as error:
        assert error.retriable
        return
    raise AssertionError("a broker answers on port 9")

asyncio.run(to_kafka())
"""


@pytest.fixture
async def service() -> AsyncIterator[str]:
    """The URL of an API in which worker `one` holds four pages."""
    fed, settings = HandFed(), ApiSettings(port=0)
    async with running_server(create_app(LiveService(fed.consumer, settings)), settings) as url:
        await fed.hold(Stream("one"), list(range(1, 17)))
        yield url


@pytest.fixture
def their_folder(tmp_path: Path) -> Path:
    """A project with packages of the same names as ours, and nothing in them."""
    folder = tmp_path / "theirs"
    for name in THEIRS:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").touch()
    return folder


async def run_among_theirs(folder: Path, program: str, *arguments: str) -> set[str]:
    """Run a program in a process that finds their packages first. Returns which of our names it has imported."""
    shown = "\nprint(*sorted({name.partition('.')[0] for name in sys.modules}))"
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program + shown,
        *arguments,
        cwd=folder,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return OURS & set(output.decode().split())


async def test_a_router_needs_only_kvsight_names(service: str, their_folder: Path) -> None:
    assert await run_among_theirs(their_folder, ROUTER, service) == OF_ROUTERS


async def test_an_engine_needs_only_kvsight_names(their_folder: Path, tmp_path: Path) -> None:
    assert await run_among_theirs(their_folder, ENGINE, str(tmp_path / "logs")) == OF_ENGINES
    for kind in ("RadixCache", "HiRadixCache", "MambaRadixCache", "HiMambaRadixCache", "UnifiedRadixCache"):
        records = [record for _, record in EventLogReader(tmp_path / "logs" / kind).read()]
        assert sum(map(num_pages, records)) >= 4


@pytest.mark.parametrize("name", kvsight.__all__)
def test_every_public_name_is_used_by_one_of_them(name: str) -> None:
    assert re.search(rf"\b{name}\b", ROUTER + ENGINE)


def num_pages(record: LogRecord) -> int:
    """Pages that a record of the log stores."""
    return sum(len(step.hashes) for step in decode_batch(record.payload).steps if isinstance(step, StoredPages))
