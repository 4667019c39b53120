"""Memory of both services that hold the same pages of eight engines."""

from collections.abc import Iterator
from statistics import median

from benchmarks.peers.ingest import PROMPT_PAGES, WARM_UP_PROMPTS, WORKERS, Kind, engines, sent
from benchmarks.peers.services import KVSIGHT, dynamo, resident_bytes, running
from benchmarks.report import Figure, figure

ROUNDS = 3
_PARTS, _PROMPTS = 16, 256
"""Sent one after the other, so that little waits in queues."""


def run() -> Iterator[Figure]:
    """Yield all figures, ratios first."""
    peer = dynamo(2)
    if peer is None:
        return
    pages = _PARTS * _PROMPTS * PROMPT_PAGES
    for is_shared, what in ((True, "the same pages"), (False, "pages of its own")):
        kind = Kind(
            PROMPT_PAGES, "array", (WARM_UP_PROMPTS, *[_PROMPTS // (1 if is_shared else WORKERS)] * _PARTS), is_shared
        )
        grown: list[list[float]] = [[], []]
        empty: list[list[float]] = [[], []]
        with engines(kind) as (pipe, last):
            for _ in range(ROUNDS):
                for number, service in enumerate((KVSIGHT, peer)):
                    with running(service) as client:
                        parts = sent(client, pipe, last)
                        next(parts)
                        before = resident_bytes(client)
                        list(parts)
                        empty[number].append(before / 2**20)
                        grown[number].append((resident_bytes(client) - before) / pages)
        row = f"memory, {pages:,} pages, {WORKERS} workers, each holds {what}"
        yield figure(f"{row}: kvsight : Dynamo", "x", [median(grown[0]) / median(grown[1])])
        for name, each, start in zip(("kvsight", "Dynamo"), grown, empty, strict=True):
            yield figure(f"{row}: {name}", "bytes a page", each)
            yield figure(f"{row}: {name}, before", "MiB", start)
