"""The counts of an audit equal those of a model in plain Python, on random logs with planted faults."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low
from typing import Any

import pytest

from analysis.audit.audit import audit_log
from kv_events.log.event_log import EventLogWriter
from kv_events.records import LogRecord
from kv_events.schema import MEDIA, AllBlocksCleared, PackedRemoved, PackedStored, SnapshotBegin, SnapshotEnd, WireEvent
from tests.support.effort import num_examples
from tests.support.log.late_log import write_late_log
from tests.support.log.records import Stream, digest_of, records_of, removed, splitmix, stored

CHURN_S = 1.0
PAGES = [splitmix(number) for number in range(40)]


@dataclass
class Seen:
    """What one stream's batches amount to, as a reader sees them."""

    epoch: int = -1
    next_seq: int = 0
    first_missing: int | None = None
    """The lowest number that was skipped, until a resync has ended with the right digest."""
    held: dict[tuple[int, int], float] = field(default_factory=dict)
    """(page, tier) -> time at which it came there."""
    left: dict[tuple[int, int], float] = field(default_factory=dict)
    """(page, tier) -> time at which it was removed, while the page stayed on another tier."""
    parents: dict[int, int] = field(default_factory=dict)
    resync: set[tuple[int, int]] | None = None
    """What the resync in progress has named."""
    facts: Counter[str] = field(default_factory=Counter)
    is_partial: bool = False
    """Whether it is degraded only because of batches before the log."""
    first_bad: int | None = None
    first_gap: int | None = None

    def holds(self, page: int) -> bool:
        return any((page, tier) in self.held for tier in range(4))


class Model:
    """Counts everything from scratch."""

    def __init__(self) -> None:
        self.streams: dict[str, Seen] = {}
        self.pages: Counter[tuple[str, int]] = Counter()
        self.lifetimes: list[list[float]] = [[], [], [], []]
        self.stores: Counter[int] = Counter()
        self.resync_pages = 0
        self.num_resyncs = 0

    def apply(self, index: int, stream: Stream, seq: int, events: list[WireEvent], digest: bytes, now: float) -> None:
        seen = self.streams.setdefault(stream.id.key, Seen())
        is_new_epoch = stream.epoch != seen.epoch
        expected = 0 if is_new_epoch else seen.next_seq
        if is_new_epoch:
            seen.first_missing = None
        if seq < expected and (seen.first_missing is None or seq < seen.first_missing):
            seen.facts["duplicate_batches"] += 1
            return
        seen.facts["epochs"] += is_new_epoch
        if (is_new_epoch and seen.epoch >= 0) or seq != expected:
            self.end_resync(seen)
        if is_new_epoch and seq == 0 and not (events and isinstance(events[0], SnapshotBegin)):
            events = [AllBlocksCleared(), *events]
        if seq != expected:  # after a gap, a number that was skipped is not known to be a duplicate
            seen.first_missing = min(expected, seq) if seen.first_missing is None else min(seen.first_missing, seq)
            if seen.epoch < 0:
                seen.facts["earlier_batches"] = seq
                seen.is_partial = True
            else:
                seen.is_partial = False
                seen.facts["gaps"] += 1
                seen.facts["missing_batches"] += max(0, seq - expected)
                seen.first_gap = index if seen.first_gap is None else seen.first_gap
        seen.epoch, seen.next_seq = stream.epoch, seq + 1
        seen.facts["batches"] += 1
        seen.facts["heartbeats"] += not events
        num_resyncs = seen.facts["resyncs"]
        for event in events:
            self.event(seen, event, now)
        if seen.resync is None:
            self.confirm(seen, index, events, digest, num_resyncs)
        else:
            seen.is_partial = False

    def confirm(self, seen: Seen, index: int, events: list[WireEvent], digest: bytes, num_resyncs: int) -> None:
        if digest == digest_of(seen.held):
            seen.is_partial = False
            if events and isinstance(events[-1], SnapshotEnd):
                seen.first_missing = None
            return
        if seen.is_partial and seen.facts["resyncs"] == num_resyncs:
            return
        seen.facts["digest_mismatches"] += 1
        if seen.first_missing is None and seen.first_bad is None:
            seen.first_bad = index

    def event(self, seen: Seen, event: WireEvent, now: float) -> None:
        match event:
            case PackedStored():
                self.store(seen, event, now)
            case PackedRemoved():
                self.remove(seen, event, now)
            case AllBlocksCleared():
                seen.facts["clears"] += 1
                seen.is_partial = False
                self.sweep(seen, set())
            case SnapshotBegin():
                self.end_resync(seen)
                seen.resync = set()
                self.num_resyncs += 1
            case SnapshotEnd():
                if seen.resync is not None:
                    self.sweep(seen, seen.resync)
                    seen.facts["resyncs"] += 1
                self.end_resync(seen)

    def end_resync(self, seen: Seen) -> None:
        seen.resync = None

    def store(self, seen: Seen, event: PackedStored, now: float) -> None:
        tier, hashes = MEDIA.index(event.medium), words(event.sequence_hashes)
        parents, before = iter(words(event.parents)), 0
        for number, page in enumerate(hashes):
            begins = event.chain_starts[number // 8] >> number % 8 & 1
            parent = next(parents) if begins else before
            if begins and parent and not seen.holds(parent) and seen.resync is None:
                self.pages["orphan", tier] += 1
            before = page
            self.stores[page] += not seen.holds(page)
            self.resync_pages += seen.resync is not None
            seen.parents[page] = parent
            if (page, tier) in seen.held:
                self.pages["double", tier] += seen.resync is None
            else:
                left = seen.left.pop((page, tier), None) if seen.holds(page) else None
                self.pages["bounced", tier] += left is not None and ms(now) - ms(left) < CHURN_S * 1000
                self.pages["stored", tier] += 1
                if not seen.holds(page):
                    self.forget_left(seen, page)
                seen.held[page, tier] = now
            if seen.resync is not None:
                seen.resync.add((page, tier))

    def remove(self, seen: Seen, event: PackedRemoved, now: float) -> None:
        tier = MEDIA.index(event.medium)
        for page in words(event.sequence_hashes):
            since = seen.held.pop((page, tier), None)
            if since is None:
                self.pages["unknown", tier] += 1
                continue
            self.pages["removed", tier] += 1
            self.pages["churned", tier] += ms(now) - ms(since) < CHURN_S * 1000
            self.lifetimes[tier].append((ms(now) - ms(since)) / 1000)
            seen.left[page, tier] = now
            if not seen.holds(page):
                self.forget_left(seen, page)

    def sweep(self, seen: Seen, kept: set[tuple[int, int]]) -> None:
        for page, tier in list(seen.held):
            if (page, tier) not in kept:
                del seen.held[page, tier]
                self.pages["swept", tier] += 1
                if not seen.holds(page):
                    self.forget_left(seen, page)

    def forget_left(self, seen: Seen, page: int) -> None:
        for tier in range(4):
            seen.left.pop((page, tier), None)

    def num_orphans(self) -> int:
        pages = [(seen, page) for seen in self.streams.values() for page in {page for page, _ in seen.held}]
        return sum(bool(seen.parents[page]) and not seen.holds(seen.parents[page]) for seen, page in pages)


def words(packed: bytes) -> list[int]:
    return [int.from_bytes(packed[at : at + 8], "little") for at in range(0, len(packed), 8)]


def ms(seconds: float) -> int:
    return int(seconds * 1000)


class RandomLog:
    """Writes a log with planted faults, and tells the model what a reader gets of it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.model = Model()
        self.now = 1_700_000_000.0
        self.num_unreadable = 0
        self.streams = [Stream(f"w{number}") for number in range(3)]
        with EventLogWriter(folder) as self.writer:
            for _ in range(self.random.randrange(20, 150)):
                self.now += self.random.choice([0.0, 0.05, 0.2, 0.6])
                self.step(self.random.choice(self.streams))

    def step(self, stream: Stream) -> None:
        dice = self.random
        does: list[tuple[int, Callable[[Stream], Any]]] = [
            (30, lambda s: self.send(s, *self.events(s))),
            (4, lambda s: self.send(s)),
            (3, lambda s: self.send(s, *self.events(s), is_lost=True)),
            (2, lambda s: self.send(s, *self.events(s), is_wrong=True)),
            (2, lambda s: self.send(s, *self.events(s), is_doubled=True)),
            (2, self.resync),
            (1, lambda s: self.send(s, SnapshotBegin("cut off"), stored((0, dice.sample(PAGES, 2))))),
            (1, lambda s: self.send(s, AllBlocksCleared())),
            (1, self.restart),
            (1, lambda _: self.garbage()),
        ]
        dice.choices([each for _, each in does], [weight for weight, _ in does])[0](stream)

    def events(self, stream: Stream) -> list[WireEvent]:
        found: list[WireEvent] = []
        for _ in range(self.random.randrange(1, 3)):
            tier = self.random.choice([0, 0, 1, 2])
            if self.random.random() < 0.6:
                pages = self.random.sample(PAGES, self.random.randrange(1, 6))
                parent = self.random.choice([0, 0, *PAGES])
                chains = [(parent, pages)] if len(pages) < 4 else [(parent, pages[:2]), (pages[0], pages[2:])]
                found.append(stored(*chains, tier=tier))
            else:
                held = sorted(page for page, t in stream.held if t == tier)
                some = self.random.sample(held, min(len(held), 2)) + self.random.sample(PAGES, 1)
                found.append(removed(some, tier))
        return found

    def resync(self, stream: Stream) -> None:
        stores = []
        for tier in range(4):
            pages = sorted(page for page, t in stream.held if t == tier)
            if pages:
                stores.append(stored(*[(0, [page]) for page in pages], tier=tier))
        self.send(stream, SnapshotBegin("test"), *stores, SnapshotEnd())

    def restart(self, stream: Stream) -> None:
        stream.restart()
        self.send(stream, *self.events(stream), is_lost=self.random.random() < 0.3)

    def send(
        self,
        stream: Stream,
        *events: WireEvent,
        is_lost: bool = False,
        is_wrong: bool = False,
        is_doubled: bool = False,
    ) -> None:
        seq = stream.seq
        record = stream.batch(*events, digest=bytes(63) + b"x" if is_wrong else None, now=self.now)
        digest = bytes(63) + b"x" if is_wrong else digest_of(stream.held)
        for _ in range(0 if is_lost else 2 if is_doubled else 1):
            index = self.writer.append(record)
            self.model.apply(index, stream, seq, list(events), digest, self.now)

    def garbage(self) -> None:
        self.num_unreadable += 1
        self.writer.append(LogRecord(0, 0, ms(self.now), b"k", b"\xc1 no batch"))


@pytest.mark.random_cases
@pytest.mark.parametrize("seed", range(num_examples(40)))
def test_an_audit_counts_what_a_model_counts(tmp_path: Path, seed: int) -> None:
    log = RandomLog(tmp_path, seed)
    report = audit_log(tmp_path, CHURN_S)
    model = log.model
    for found in report.streams:
        seen = model.streams.pop(found.stream)
        expected = {name: seen.facts[name] for name in seen.facts}
        assert {name: getattr(found, name) for name in expected} == expected, found.stream
        assert (found.first_bad_batch and found.first_bad_batch.index) == seen.first_bad, found.stream
        assert (found.first_gap and found.first_gap.index) == seen.first_gap, found.stream
        assert found.pages_held == len(seen.held), found.stream
        model.streams[found.stream] = seen
    assert len(report.streams) == len(model.streams)
    counted = {(name, tier): count for name, counts in report.pages.items() for tier, count in enumerate(counts)}
    assert {key: count for key, count in counted.items() if count} == {k: c for k, c in model.pages.items() if c}
    for p50_s, lifetimes in zip(report.lifetime_p50_s, model.lifetimes, strict=True):
        assert p50_s == (pytest.approx(median_low(lifetimes), 0.035, 0.001) if lifetimes else None)
    assert report.orphans == model.num_orphans()
    assert (report.num_resyncs, report.resync_pages) == (model.num_resyncs, model.resync_pages)
    assert sum(report.unreadable.values()) == log.num_unreadable
    assert report.untracked == 0
    for prefix in report.hottest:
        assert prefix.stores == model.stores[prefix.sequence_hash]
        assert prefix.workers == sum(seen.holds(prefix.sequence_hash) for seen in model.streams.values())


@pytest.mark.random_cases
@pytest.mark.parametrize("seed", range(num_examples(15)))
def test_a_log_that_begins_late_is_audited_from_its_key_frame(tmp_path: Path, seed: int) -> None:
    """What the rest of the log shows is counted; what precedes it is neither counted nor called a loss."""
    RandomLog(tmp_path / "whole", 10_000 + seed)
    records = records_of(tmp_path / "whole")
    begin = random.Random(seed).randrange(1, len(records))
    write_late_log(tmp_path / "late", records, begin)
    write_late_log(tmp_path / "first", records[:begin], 0)
    late, whole, first = (audit_log(tmp_path / name, CHURN_S) for name in ("late", "whole", "first"))
    of_first = {each.stream: each for each in first.streams}
    ended = {each.stream: each for each in whole.streams}
    known = {each.stream: each for each in late.streams}
    assert known.keys() == ended.keys()
    for name, found in known.items():
        before, after = of_first.get(name), ended[name]
        assert (found.pages_held, found.epochs) == (
            after.pages_held,
            after.epochs - (before.epochs - 1 if before else 0),
        )
        for field_name in (
            "batches",
            "heartbeats",
            "gaps",
            "missing_batches",
            "resyncs",
            "clears",
            "duplicate_batches",
        ):
            expected = getattr(after, field_name) - (getattr(before, field_name) if before else 0)
            assert getattr(found, field_name) == expected, (name, field_name)
        assert found.earlier_batches == (after.earlier_batches if before is None else 0)
        mismatches = after.digest_mismatches - (before.digest_mismatches if before else 0)
        assert found.digest_mismatches <= mismatches
        bad = None if after.first_bad_batch is None else after.first_bad_batch.index
        if bad is not None and bad >= begin:
            assert found.first_bad_batch is None or (found.first_bad_batch.index or 0) >= bad
    for name in ("stored", "removed", "unknown", "double", "swept"):
        assert [sum(pair) for pair in zip(late.pages[name], first.pages[name], strict=True)] == whole.pages[name], name
