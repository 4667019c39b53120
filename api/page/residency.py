"""GET /residency: the most shared prefixes of a namespace, and how much of each every worker holds."""

from collections.abc import Generator, Iterable
from typing import NamedTuple

import msgspec
import numpy as np

from api.page.state import PageState
from api.problems import ProblemError, ProblemKind
from indexer.namespaces import Namespace, NamespaceKey
from indexer.views import View
from kv_events.hashing import U64Array
from kv_events.http.fleet import Residency, ResidencyColumn, ResidencyNamespace, ResidencyRow

MAX_ROWS = 300
_MAX_COLUMNS = 128
_MAX_NAMESPACES = 256
_NO_NAMESPACE = NamespaceKey("", "", 0)

_encoder = msgspec.json.Encoder()


class Wanted(NamedTuple):
    """What a viewer selects. None: the page chooses."""

    model: str | None
    tenant: str | None
    block_size: int | None
    worker: str | None
    """Its streams have columns even where there are too many."""


class ResidencyAnswer(NamedTuple):
    """The map of one namespace, of which each viewer asks for some rows."""

    residency: Residency
    """Without rows."""
    rows: list[tuple[msgspec.Raw, frozenset[str]]]
    """Each row as JSON, and the workers that hold some of it."""

    def select(self, limit: int, worker: str | None) -> bytes:
        """Return `Residency` as JSON, with at most `limit` rows, of which a worker holds something if it is named."""
        rows = [row for row, holders in self.rows if worker is None or worker in holders]
        return _encoder.encode({**msgspec.structs.asdict(self.residency), "rows": rows[:limit]})


def describe_residency(scene: PageState, wanted: Wanted) -> Generator[None, None, ResidencyAnswer]:
    """Describe one namespace, in slices. Raises ProblemError (404) if none matches a model that is named."""
    namespaces = sorted(
        (each for each in scene.views.namespaces if not scene.views.namespaces.is_group(each)),
        key=lambda each: (-each.index.num_pages, each.key),
    )
    yield
    shown = [
        ResidencyNamespace(
            **each.key._asdict(),
            workers=len({view.stream.worker for view in each.views.values()}),
            pages=each.index.num_pages,
        )
        for each in namespaces[:_MAX_NAMESPACES]
    ]
    yield
    namespace = next((each for each in namespaces if _matches(each.key, wanted)), None)
    if namespace is None and wanted.model is not None:
        raise ProblemError(404, ProblemKind.UNKNOWN_MODEL, f"no worker serves model {wanted.model[:80]!r}", "model")
    views = [] if namespace is None else _columns(namespace, wanted.worker)
    yield
    rows = []
    if namespace is not None:
        columns = {view.number: number for number, view in enumerate(views)}
        for prefix in (yield from namespace.index.shared_prefixes(MAX_ROWS)):
            row = _row(namespace, columns, prefix)
            if row.cells:
                holders = frozenset(views[column].stream.worker for column, *_, pages in row.cells if pages)
                rows.append((msgspec.Raw(_encoder.encode(row)), holders))
            yield
    key = _NO_NAMESPACE if namespace is None else namespace.key
    found = Residency(
        **key._asdict(),
        time=scene.views.now(),
        namespaces=shown,
        num_columns=0 if namespace is None else len(namespace.views),
        columns=[
            ResidencyColumn(
                worker=view.stream.worker, dp_rank=view.stream.dp_rank, state=scene.views.freshness.state(view).value
            )
            for view in views
        ],
        rows=[],
    )
    return ResidencyAnswer(found, rows)


def _matches(key: NamespaceKey, wanted: Wanted) -> bool:
    asked = (wanted.model, wanted.tenant, wanted.block_size)
    return all(each in (None, given) for each, given in zip(asked, key, strict=True))


def _columns(namespace: Namespace, worker: str | None) -> list[View]:
    """Return the views that are shown: the selected worker's, then those that hold most, by name."""
    views: Iterable[View] = namespace.views.values()
    most = sorted(views, key=lambda view: (view.stream.worker != worker, -sum(view.num_pages)))[:_MAX_COLUMNS]
    return sorted(most, key=lambda view: view.stream)


def _row(namespace: Namespace, columns: dict[int, int], prefix: U64Array) -> ResidencyRow:
    """columns: stream number -> column."""
    matches = namespace.index.find(prefix)
    held = matches.pages[matches.streams]
    cells = [
        (columns[stream], gpu, cpu, disk, external)
        for stream, (gpu, cpu, disk, external) in zip(matches.streams.tolist(), held.tolist(), strict=True)
        if stream in columns
    ]
    return ResidencyRow(
        hash=f"{int(prefix[-1]):016x}",
        pages=len(prefix),
        holders=int(np.count_nonzero(held[:, 3] == len(prefix))),
        cells=cells,
    )
