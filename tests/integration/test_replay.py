"""A recorded run, replayed: the same views at its end and at every offset on the way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from indexer.replay import Replay, Until, log_records
from indexer.views import ViewState
from kv_events.codec import RemovedPages, StoredPages, decode_batch
from kv_events.event_log import EventLogReader
from kv_events.schema import AllBlocksCleared, SnapshotBegin
from simulation import SimulationSettings, WorkloadSettings, generate, simulate

Held = dict[str, set[tuple[int, int]]]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The event log of a small fleet whose caches are too small for their work, so that pages come and go."""
    folder = tmp_path_factory.mktemp("recorded")
    settings = SimulationSettings(workers=3, capacity_tokens=16_384, page_size=16, log_folder=folder)
    (report,) = simulate(generate(WorkloadSettings(num_requests=150)), settings, ["kv-aware"])
    assert report.divergent_pages == 0
    return folder / "kv-aware"


def held_by_the_log(folder: Path, stop: int) -> Held:
    """What each stream's events say is held after the first `stop` records, by sets alone."""
    held: Held = {}
    for _, record in EventLogReader(folder).read(0, stop):
        pages = held.setdefault(record.key.decode(), set())
        for step in decode_batch(record.payload).steps:
            match step:
                case StoredPages():
                    pages |= {(h, step.medium) for h in step.hashes.tolist()}
                case RemovedPages():
                    pages -= {(h, step.medium) for h in step.hashes.tolist()}
                case AllBlocksCleared() | SnapshotBegin():
                    pages.clear()
    return held


def held_by_the_views(replayed: Replay) -> Held:
    held: Held = {}
    for view in replayed.namespaces.views:
        pages = held.setdefault(view.stream.key, set())
        for part in view.index.held_pages(view.number):
            for tier in range(4):
                pages |= {(h, tier) for h in part.hashes[part.tiers >> tier & 1 == 1].tolist()}
    return held


def test_a_replay_gives_the_views_of_the_end_and_of_five_earlier_offsets(recorded: Path) -> None:
    total = EventLogReader(recorded).next_index
    assert total > 150
    for offset in [total, *np.linspace(1, total - 1, 5, dtype=int).tolist()]:
        replayed = Replay().apply_all(log_records(recorded), Until(offset=offset))
        assert replayed.applier.records == offset
        assert held_by_the_views(replayed) == held_by_the_log(recorded, offset)
        assert {view.state for view in replayed.namespaces.views} == {ViewState.LIVE}
        for namespace in replayed.namespaces:
            namespace.index.check()


def test_a_replay_up_to_a_time_takes_the_records_of_that_time_along(recorded: Path) -> None:
    times = [record.timestamp_ms for record in log_records(recorded)]
    moment = sorted(times)[len(times) // 2]
    replayed = Replay().apply_all(log_records(recorded), Until(time_s=moment / 1000))
    assert replayed.applier.records == next(i for i, t in enumerate(times) if t > moment)
    assert replayed.now == max(times[: replayed.applier.records]) / 1000
