"""vLLM's and SGLang's own publishers, each in its own process, feed a bridge."""

import asyncio
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bridge import EngineSettings
from tests.models.stream_reader import Pages
from tests.rigs.bridge import LiveBridge
from tests.support.engines.publisher_process import WHOLE_DIGESTS
from tests.support.engines.released_modules import RELEASES, VLLM, VLLM_ARRAYS, Engine, engine_folder
from tests.support.servers.child_process import ChildProcess, free_port
from tests.support.waiting import async_wait_until

pytestmark = pytest.mark.timing("engines, a bridge and a service must agree within seconds")

ROOT = Path(__file__).resolve().parents[3]


class EngineProcess:
    """One rank of an engine."""

    def __init__(
        self, place: Path, engine: Engine, version: str, *, rank: int = 0, seed: int = 0, int_hashes: bool = True
    ) -> None:
        """int_hashes: vLLM's integer hashes instead of complete digests."""
        self._variables = {WHOLE_DIGESTS: "1" if int_hashes else "0"}
        self.place = place / f"rank{rank}"
        self.place.mkdir()
        self.options: dict[str, Any] = {
            "engine": engine,
            "folder": str(engine_folder(engine, version)),
            "endpoint": f"tcp://*:{free_port() - rank}",
            "replay_endpoint": f"tcp://*:{free_port() - rank}",
            "rank": rank,
            "hwm": 1,
            "batches": 2000,
            "seed": seed,
        }

    @property
    def ledger(self) -> Path:
        return self.place / f"ledger-{self.options['seed']}.json"

    def start(self) -> None:
        options = json.dumps({**self.options, "ledger": str(self.ledger)})
        command = [sys.executable, "-m", "tests.support.engines.publisher_process", options]
        self.process = ChildProcess(command, self.place / "log", {**self._variables, "PYTHONPATH": str(ROOT)})

    async def pages(self, has_begun: Callable[[], Any]) -> Pages:
        """What it holds in the end, which it goes on to once the bridge has its first batch."""
        await async_wait_until(has_begun, 30, str(self.place / "log"))
        self.ledger.with_suffix(".go").touch()
        await async_wait_until(self.ledger.exists, 90, f"{self.ledger}; {self.place / 'log'}")
        return {(tier, name) for tier, name in json.loads(self.ledger.read_text())}

    async def restarted(self) -> None:
        """Restart on the same addresses."""
        self.process.kill()
        self.options["seed"] += 100
        self.start()

    def entry(self, worker: str) -> EngineSettings:
        """Return the bridge's entry: addresses of rank 0, from which the bridge derives the others."""
        rank = self.options["rank"]
        addresses: dict[str, Any] = {
            field: "tcp://127.0.0.1:" + str(int(self.options[field].rpartition(":")[2]) + rank)
            for field in ("endpoint", "replay_endpoint")
        }
        return EngineSettings(worker=worker, model="m", dp_rank=rank, **addresses)


@pytest.mark.parametrize(
    ("engine", "version", "int_hashes"),
    [(*release, True) for release in RELEASES] + [(*VLLM_ARRAYS, False), (*VLLM, False)],
)
async def test_its_view_is_what_the_engine_holds_after_gaps_and_a_restart(
    tmp_path: Path, engine: Engine, version: str, int_hashes: bool
) -> None:
    own = EngineProcess(tmp_path, engine, version, int_hashes=int_hashes)
    own.start()
    try:
        async with LiveBridge(bridge_idle_check_s=0.2) as bridge:
            await bridge.fleet.add(own.entry("w"))
            pages = await own.pages(lambda: bridge.counters()["batches"])
            assert len(pages) > 500
            await bridge.shows(pages, deadline_s=40)
            counters = bridge.counters()
            assert (counters["gaps"] > 0, counters["losses"], sum(counters["bad_events"].values())) == (True, 0, 0)
            await own.restarted()
            await bridge.shows(await own.pages(lambda: bridge.counters()["restarts"]), deadline_s=40)
    finally:
        own.process.kill()


async def test_one_bridge_reads_ranks_and_engines_of_all_kinds(tmp_path: Path) -> None:
    engines = {}
    for number, (engine, version) in enumerate(RELEASES):
        (tmp_path / version).mkdir()
        for rank in range(2):
            own = EngineProcess(tmp_path / version, engine, version, rank=rank, seed=10 * number + rank)
            own.options["batches"] = 500
            engines[f"w{number}", rank] = own
    try:
        async with LiveBridge(bridge_idle_check_s=0.2) as bridge:
            for (worker, _), own in engines.items():
                await bridge.fleet.add(own.entry(worker))
                own.start()
            begun = [partial(lambda *who: bridge.counters(*who)["batches"], *who) for who in engines]
            held = await asyncio.gather(*map(EngineProcess.pages, engines.values(), begun))  # all at the same time
            for (worker, rank), pages in zip(engines, held, strict=True):
                await bridge.shows(pages, worker, rank, deadline_s=60)
    finally:
        for own in engines.values():
            own.process.kill()
