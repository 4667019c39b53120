"""The tables of docs/scale.md, calculated from measured constants: `python -m benchmarks.paper`

The constants come from benchmarks/README.md and from the defaults of the settings. Change `FLEETS` for another fleet.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from indexer.settings import IndexerSettings
from indexer.shards.assignment import MAX_MEMBERS

FIGURES = Path(__file__).resolve().parent / "README.md"
BUSY = 0.8
"""Part of a core that a process may use."""
MOST_APPLYING = 0.4
"""Part of a core that a member of a group may use for events."""
LINK_BYTES_S = 10e9 / 8
MEMORY, RESYNC = "memory a page, 64 workers hold all, process", "resync of 1,000,000 pages"


class Fleet(NamedTuple):
    """What the engines and routers do."""

    workers: int
    pages: int
    queries_per_s: int
    namespaces: int
    """Models and tenants that share no pages, with equally many workers."""
    records_per_s: int
    """Of each worker."""
    changes_per_s: int = 2_500
    """Pages that each worker stores and removes."""
    holders: int = 64
    """Workers in an answer."""

    def part(self, divisor: int) -> Fleet:
        """Return a part of the workers with their pages and queries, such as those of one namespace."""
        return self._replace(
            workers=math.ceil(self.workers / divisor),
            pages=math.ceil(self.pages / divisor),
            queries_per_s=math.ceil(self.queries_per_s / divisor),
        )


FLEETS = (
    Fleet(100, 10_000_000, 5_000, 1, 50),
    Fleet(1_000, 100_000_000, 100_000, 5, 10),
    Fleet(10_000, 1_000_000_000, 1_000_000, 20, 10),
    Fleet(10_000, 1_000_000_000, 1_000_000, 20, 200),
)


class Plan(NamedTuple):
    """The processes of one mode."""

    mode: str
    applying: float
    """Part of a core that each process uses for events."""
    processes: int
    """0: one core is not enough for the events that each process must apply."""
    memory_gb: float
    """Of each process, without holder sets."""
    from_kafka_mb_s: float
    """Of all processes."""


@cache
def measured(row: str) -> float:
    """Return the median in a row of benchmarks/README.md. The row is its first cell, or the beginning of its cells."""
    found = re.search(rf"^\| {re.escape(row)} \| ([\d.,]+) \|", FIGURES.read_text(), re.MULTILINE)
    if found is None:
        raise LookupError(f"benchmarks/README.md has no row {row!r}")
    return float(found[1].replace(",", ""))


def _line(x1: float, y1: float, x2: float, y2: float, x: float) -> float:
    return y1 + (y2 - y1) / (x2 - x1) * (x - x1)


def record_us(num_pages: float) -> float:
    """CPU time to apply a record from Kafka."""
    few, many = (measured(f"a record from Kafka, {n} pages, CPU time") for n in (12, 256))
    return _line(12, few, 256, many, num_pages)


def record_bytes(num_pages: float) -> float:
    """Size of a record."""
    few, many = (measured(f"a record on the wire, {n} pages") for n in (12, 256))
    return _line(12, few, 256, many, num_pages)


def query_us(holders: float) -> float:
    """Time of a core for a query of 64 pages over HTTP, JSON tokens."""
    few, many = (measured(f"answer 64 pages, {n} workers hold all") for n in ("64", "10,000"))
    return 1e6 / measured("64 | 64") + _line(64, 0, 10_000, many - few, holders)


def answer_kb(holders: float) -> float:
    """Size of an answer."""
    return measured("size of an answer, 1,000 workers") * holders / 1_000


def set_bytes(streams: int) -> int:
    """Size of a holder set: a bit for each stream and tier, in steps of powers of two from 64 streams on."""
    return max(64, 1 << (streams - 1).bit_length()) * 4 // 8


def applying(fleet: Fleet) -> float:
    """Part of a core that the events of a fleet take."""
    return fleet.workers * fleet.records_per_s * record_us(fleet.changes_per_s / fleet.records_per_s) / 1e6


def kafka_mb_s(fleet: Fleet) -> float:
    """What the engines write."""
    return fleet.workers * fleet.records_per_s * record_bytes(fleet.changes_per_s / fleet.records_per_s) / 1e6


def memory_gb(fleet: Fleet) -> float:
    """Memory of the pages in one index."""
    return fleet.pages * measured(MEMORY) / 1e9


def replicas(fleet: Fleet) -> Plan:
    """Every process reads everything."""
    busy = applying(fleet)
    querying = fleet.queries_per_s * query_us(fleet.holders) / 1e6
    processes = max(2, math.ceil(querying / (BUSY - busy))) if busy < BUSY else 0
    return Plan("replicas", busy, processes, memory_gb(fleet), processes * kafka_mb_s(fleet))


def by_namespace(fleet: Fleet) -> Plan:
    """Replicas for each namespace, which has a topic of its own."""
    plan = replicas(fleet.part(fleet.namespaces))
    return plan._replace(
        mode="replicas of each namespace",
        processes=plan.processes * fleet.namespaces,
        from_kafka_mb_s=plan.from_kafka_mb_s * fleet.namespaces,
    )


def by_partition(fleet: Fleet) -> Plan:
    """Groups whose members share the workers. Each query costs every member of one group an answer."""
    members = num_members(fleet)
    part = fleet.part(members)
    busy = applying(part)
    answering_us = query_us(fleet.holders / members) + query_us(0)  # as a member, and as the one that asks the others
    groups = math.ceil(fleet.queries_per_s * answering_us / 1e6 / (BUSY - busy)) if members <= MAX_MEMBERS else 0
    return Plan(f"groups of {members}", busy, groups * members, memory_gb(part), groups * kafka_mb_s(fleet))


def num_members(fleet: Fleet) -> int:
    """Return how many members leave each of them enough time for queries."""
    return max(2, math.ceil(applying(fleet) / MOST_APPLYING))


# --- the tables -------------------------------------------------------------------------------------------------------


def table(header: str, rows: Iterable[Iterable[str]]) -> list[str]:
    """Return the lines of a table in Markdown, with numbers in all columns but the first. header: the line of names."""
    columns = header.count("|") - 1
    return [header, "|---|" + "---:|" * (columns - 1), *(f"| {' | '.join(row)} |" for row in rows)]


def constants() -> list[str]:
    """Return what the other tables are calculated from."""
    page_us, page_bytes = record_us(1) - record_us(0), record_bytes(1) - record_bytes(0)
    holder_us = (query_us(1_000) - query_us(0)) / 1_000
    rows = [
        ("apply a record, CPU time", f"{record_us(0):.0f} us, and {page_us:.2f} us a page"),
        ("size of a record", f"{record_bytes(0):.0f} bytes, and {page_bytes:.1f} bytes a page"),
        (
            "answer a query of 64 pages over HTTP",
            f"{query_us(0):.1f} us, and {holder_us:.3f} us a worker in the answer",
        ),
        ("size of an answer", f"{answer_kb(1):.3f} KB a worker"),
        ("memory of a page in the index", f"{measured(MEMORY):.1f} bytes"),
        ("resync of a million pages, in the engine", f"{measured(RESYNC):.0f} ms"),
    ]
    return table("| constant | value |", rows)


def limits(fleet: Fleet) -> list[str]:
    """Return what ends the growth of one process."""
    settings = IndexerSettings()
    workers = BUSY / applying(fleet._replace(workers=1))
    rows = [
        (
            f"workers, {fleet.changes_per_s:,} pages in {fleet.records_per_s} records a second",
            f"{workers:,.0f}",
            "one core",
        ),
        ("pages", f"{settings.max_pages:,}", "`KVSIGHT_MAX_PAGES`"),
        ("streams", f"{settings.max_streams:,}", "`KVSIGHT_MAX_STREAMS`"),
    ]
    for streams in (64, 1_000, 10_000):
        num_sets = settings.max_set_bytes // set_bytes(streams)
        what = f"combinations of holders, {streams:,} streams ({set_bytes(streams):,} bytes each)"
        rows.append((what, f"{num_sets:,}", "`KVSIGHT_MAX_SET_BYTES`"))
    for holders in (64, 1_000, 10_000):
        by_core, by_link = 1e6 * BUSY / query_us(holders), LINK_BYTES_S / answer_kb(holders) / 1e3
        limit = "one core" if by_core < by_link else "10 Gbit/s"
        rows.append((f"answers a second, {holders:,} workers each", f"{min(by_core, by_link):,.0f}", limit))
    return table("| of one process | at most | because of |", rows)


def plans(fleet: Fleet) -> list[str]:
    """Return the modes for a fleet."""
    rows = []
    for plan in (replicas(fleet), by_namespace(fleet), by_partition(fleet)):
        needs = "not possible", f"{plan.memory_gb:,.2f} GB", "", ""
        if plan.processes:
            memory = f"{plan.memory_gb:,.2f} GB", f"{plan.processes * plan.memory_gb:,.1f} GB"
            needs = f"{plan.processes:,}", *memory, f"{plan.from_kafka_mb_s:,.0f} MB/s"
        rows.append((plan.mode, f"{plan.applying:.2f}", *needs))
    return table("| mode | cores for events, each | processes | memory, each | memory, all | read from Kafka |", rows)


def load(fleet: Fleet) -> str:
    """Return what a fleet does, in words."""
    gbit_s = fleet.queries_per_s * answer_kb(fleet.holders) * 8 / 1e6
    return (
        f"{fleet.workers:,} workers, {fleet.pages:,} pages, namespaces: {fleet.namespaces:,}, "
        f"{fleet.queries_per_s:,} queries a second, {fleet.records_per_s} records a second from each worker: "
        f"{kafka_mb_s(fleet):,.0f} MB/s into Kafka, {gbit_s:,.1f} Gbit/s of answers"
    )


def storm(fleet: Fleet) -> list[str]:
    """Return what it costs if all workers resend everything."""
    page_us, page_bytes = record_us(1) - record_us(0), record_bytes(1) - record_bytes(0)
    sending_ms = measured(RESYNC) * fleet.pages / fleet.workers / 1e6
    rate = IndexerSettings().resync_rate_per_s
    rows = [
        ("sent by all engines", f"{fleet.pages * page_bytes / 1e9:,.1f} GB"),
        ("prepared by each engine, outside of its own threads", f"{sending_ms:,.1f} ms"),
    ]
    members = num_members(fleet)
    readers = (("everything", 1), ("one namespace", fleet.namespaces), (f"its part of a group of {members}", members))
    for what, divisor in readers:
        applying_s, asking_s = fleet.pages * page_us / 1e6 / divisor, fleet.workers / rate / divisor
        rows.append((f"a process that reads {what}: asks all of its workers in", f"{asking_s:,.0f} s"))
        rows.append((f"a process that reads {what}: applies their pages in", f"{applying_s:,.0f} s"))
    return table("| what | value |", rows)


def tables() -> list[str]:
    """Return the lines of the page that are calculated."""
    large = FLEETS[-2]
    lines = [*constants(), *limits(large), *storm(large)]
    for fleet in FLEETS:
        lines += [load(fleet), *plans(fleet)]
    return lines


if __name__ == "__main__":
    print("\n".join(tables()))
