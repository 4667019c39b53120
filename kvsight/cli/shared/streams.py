"""Worker streams as tables: what `kvsight top --ranks` and `kvsight replay` show."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from kv_events.http.workers import Worker
from kv_events.runtime.words import count, duration, natural_order, printable
from kvsight.cli.shared.tables import Column, table_lines

MEDIA = {"GPU": "gpu", "CPU_PINNED": "cpu", "DISK": "disk", "EXTERNAL": "external"}
"""Medium -> tier, fastest first."""
_DEFAULT_TENANT = "default"


class StreamRow(NamedTuple):
    """One worker stream and the state of its view."""

    model: str
    tenant: str
    block_size: int
    worker: str
    dp_rank: int
    group: str
    """Group of a group stream, otherwise empty."""
    state: str
    reason: str
    age_ms: int
    pages: dict[str, int]
    """Medium -> pages held."""

    @property
    def namespace(self) -> tuple[str, str, int]:
        """Model, tenant, tokens per page."""
        return self.model, self.tenant, self.block_size


def rows_of(workers: Iterable[Worker]) -> list[StreamRow]:
    """The streams of the answer of GET /workers."""
    return [
        StreamRow(
            worker.model_name,
            worker.routing_group,
            worker.block_size,
            worker.instance_id,
            rank,
            group,
            listener.state,
            listener.failure or listener.stale_reason,
            listener.age_ms,
            listener.pages,
        )
        for worker in workers
        for group, listeners in {"": worker.listeners, **worker.groups}.items()
        for rank, listener in listeners.items()
    ]


def streams_lines(rows: Iterable[StreamRow], width: int) -> Iterator[str]:
    """Yield a table of streams for each model, tenant and page size. width: terminal cells."""
    ordered = sorted(rows, key=lambda row: (row.namespace, natural_order(row.worker), row.dp_rank, row.group))
    for number, (namespace, found) in enumerate(groupby(ordered, key=lambda row: row.namespace)):
        streams = list(found)
        if number:
            yield ""
        yield f"{namespace_text(*namespace)}: {count(len({row.worker for row in streams}), 'worker')}"
        yield from table_lines(_columns(streams), width)


def namespace_text(model: str, tenant: str, block_size: int) -> str:
    """A namespace in words. block_size: 0 if it is unknown."""
    of_tenant = "" if tenant == _DEFAULT_TENANT else f" of tenant {printable(tenant)}"
    return f"model {printable(model)}{of_tenant}" + (f", pages of {block_size} tokens" if block_size else "")


def media_held(holders: Iterable[Mapping[str, int]]) -> list[str]:
    """The media on which any of the holders has pages, fastest first. holders: of each, medium -> pages."""
    held = {medium for held in holders for medium, pages in held.items() if pages}
    return [medium for medium in MEDIA if medium in held]


def _columns(rows: Sequence[StreamRow]) -> Iterator[Column]:
    yield Column("worker", [row.worker for row in rows])
    yield Column("rank", [row.dp_rank for row in rows], rank=1)
    if any(row.group for row in rows):
        yield Column("group", [row.group for row in rows], rank=2)
    yield Column("state", [row.state for row in rows])
    yield Column("last heard", [f"{duration(row.age_ms)} ago" for row in rows], is_number=True, rank=4)
    for medium in media_held(row.pages for row in rows) or ["GPU"]:
        title = f"{MEDIA[medium]} pages"
        yield Column(title, [row.pages.get(medium, 0) for row in rows], rank=3)
    if any(row.reason for row in rows):
        yield Column("reason", [row.reason for row in rows], rank=5)
