"""Worker streams as tables: what `kvsight top --ranks` and `kvsight replay` show."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from textwrap import wrap
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
    endpoint: str = ""
    """Address of a registered engine, otherwise empty."""
    cause: str = ""
    since: float | None = None
    """When the cause began, in seconds since 1970."""
    remedy: str = ""
    is_heard: bool = True
    booked: tuple[int, int, int] = (0, 0, 0)
    """Requests, prompt tokens that are still to be computed, and pages that are reserved."""

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
            listener.stale_reason,
            listener.age_ms,
            listener.pages,
            listener.endpoint if "://" in listener.endpoint else "",
            listener.cause or listener.failure or "",
            listener.cause_since,
            listener.remedy,
            listener.epoch >= 0,
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
    troubled = [row for row in ordered if row.cause]
    if troubled:
        yield ""
    for row in troubled:
        name = f"{row.worker} rank {row.dp_rank}" if row.dp_rank else row.worker
        yield from wrap(trouble_text(name, row.endpoint, row.cause, row.since, row.remedy), width)


def trouble_text(name: str, endpoint: str, cause: str, since: float | None, remedy: str) -> str:
    """What is wrong with a worker, since when, and what to do about it. since: seconds since 1970."""
    where = f" ({endpoint})" if endpoint and endpoint not in cause else ""
    when = "" if since is None else f", since {clock(since)}"
    return printable(f"{name}{where}: {cause}{when}. {remedy}".rstrip())


def clock(seconds: float) -> str:
    """A time of today, or with its date. In the local zone."""
    then, now = datetime.fromtimestamp(seconds), datetime.now()
    return then.strftime("%H:%M:%S" if then.date() == now.date() else "%Y-%m-%d %H:%M:%S")


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
    yield Column(
        "last heard",
        [f"{duration(row.age_ms)} ago" if row.is_heard else "not yet" for row in rows],
        is_number=True,
        rank=4,
    )
    for medium in media_held(row.pages for row in rows) or ["GPU"]:
        title = f"{MEDIA[medium]} pages"
        yield Column(title, [row.pages.get(medium, 0) for row in rows], rank=3)
    if any(any(row.booked) for row in rows):
        for number, title in enumerate(("requests", "prefill tokens", "decode pages")):
            yield Column(title, [row.booked[number] for row in rows], rank=3)
    if any(row.reason for row in rows):
        yield Column("reason", [row.reason for row in rows], rank=5)
