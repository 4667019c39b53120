"""The public names in a process whose own packages are called `api`, `indexer` and so on, like those of kvsight."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kv_events.codec import StoredPages, decode_batch
from kv_events.records import LogRecord
from tests.rigs.api import listening
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream, records_of

pytestmark = pytest.mark.timing("an engine's process must publish within seconds")

ROOT = Path(__file__).resolve().parents[3]
THEIRS = ("api", "indexer", "simulation", "bridge")
OF_ROUTERS = {"kvsight", "kv_events"}
OF_ENGINES = {"kvsight", "kv_events", "engine_cache", "publisher"}
OURS = {*OF_ENGINES, *THEIRS}

ROUTER = """
import asyncio, sys
import numpy as np
from kvsight import AsyncClient, Client, Decision, Outcome, Prompt, best_worker, rank_workers, sequence_hashes

url, tokens = sys.argv[1], list(range(1, 17))
with Client(url) as client:
    answer = client.query("m", tokens)
    assert best_worker(answer, load={"one": 1.0}).tokens == 16
    ranking = rank_workers(answer, load={"one": 1.0})
    decision = Decision("r1", Prompt("m", tokens), "one", predicted_tokens=16, candidates=ranking)
    client.decided([decision, Outcome("r1", 16)])
    hashes = sequence_hashes(np.array(tokens, np.uint32), 4)
    (found,) = client.query_batch([Prompt("m", seq_hashes=hashes)])
    assert found.instances["one"].gpu == 16
    assert len(client.view("one").pages) == 4
    assert client.workers() and client.fleet().workers and next(client.events())
    with client.placed("m", tokens, more={"explain": True, "sources": True}):
        assert client.loads()[0].loads[0].active_requests == 1

async def main():
    async with AsyncClient(url) as client:
        assert (await client.best_worker("m", tokens)).worker == "one"

asyncio.run(main())
"""

ENGINE = """
import sys
from pathlib import Path
from kvsight import (
    AllBlocksCleared, BlockRemoved, BlockStored, EventPublisher, FileSink, KafkaSink, PublisherSettings, RadixCache,
    StorageMedium, ZmqSink,
)
from engine_cache import (
    BytelessHostPool, HiCacheController, HiRadixCache, InsertParams, ManualCopyEngine, PagedTokenToKVPoolAllocator,
    PoolEntry, RadixKey,
)
from engine_cache.storage import PoolName

folder, tokens = Path(sys.argv[1]), list(range(1, 17))
for kind in (RadixCache, HiRadixCache):
    allocator = PagedTokenToKVPoolAllocator(64, 4)
    options = dict(page_size=4, allocator=allocator, enable_kv_cache_events=True)
    if kind is HiRadixCache:
        kv = PoolEntry(PoolName.KV, BytelessHostPool(256, 4), None, allocator)
        options["controller"] = HiCacheController(kv, ManualCopyEngine())
    cache = kind(**options)
    cache.insert(InsertParams(RadixKey(tokens), allocator.alloc(16)))
    settings = PublisherSettings(model="m", worker=kind.__name__, block_size=4)
    with EventPublisher(settings, FileSink(folder / kind.__name__)) as publisher:
        publisher.publish(cache.take_events())
    assert publisher.stats().pages["held"] == 4, publisher.stats()

settings = PublisherSettings(model="m", worker="by-hand", block_size=4, zmq=f"ipc://{folder}/zmq", with_tokens=True)
with EventPublisher(settings, ZmqSink(settings)) as publisher:
    publisher.publish([BlockStored([1, 2], None, tokens[:8], 4, None, StorageMedium.GPU), BlockRemoved([2])])
    publisher.publish([AllBlocksCleared()])
assert not publisher.stats().rejected_events, publisher.stats()
KafkaSink(PublisherSettings(model="m", worker="w", block_size=4, kafka="127.0.0.1:9"))
"""


@pytest.fixture
async def service() -> AsyncIterator[str]:
    """The URL of an API in which worker `one` holds four pages."""
    fed = HandFed()
    async with listening(fed.consumer) as url:
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
    for kind in ("RadixCache", "HiRadixCache"):
        assert sum(map(num_pages, records_of(tmp_path / "logs" / kind))) >= 4


def num_pages(record: LogRecord) -> int:
    """Pages that a record of the log stores."""
    return sum(len(step.hashes) for step in decode_batch(record.payload).steps if isinstance(step, StoredPages))
