"""All views, by namespace: one index for each (model, tenant, block size).

Namespaces of group streams hang below that of their model, in whatever order the two are made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from indexer.errors import IndexFullError
from indexer.index import OverlapIndex
from indexer.settings import IndexerSettings
from indexer.views import View
from kv_events.streams import StreamId, split_group


class NamespaceKey(NamedTuple):
    """What keeps pages apart besides their hash."""

    model: str
    tenant: str
    block_size: int


@dataclass(slots=True, eq=False)
class Namespace:
    """One index and the views that live in it."""

    key: NamespaceKey
    index: OverlapIndex
    views: dict[int, View] = field(default_factory=dict)
    """By stream number of the index."""
    by_rank: dict[tuple[str, int], View] = field(default_factory=dict)
    """The same by worker and DP rank."""
    groups: dict[str, Namespace] = field(default_factory=dict, repr=False)
    """Namespaces of its group streams, of the same tenant and block size."""


class Namespaces:
    """Every view of this process. One thread writes and reads."""

    def __init__(self, settings: IndexerSettings | None = None) -> None:
        self._settings = settings or IndexerSettings()
        self._namespaces: dict[NamespaceKey, Namespace] = {}
        self._homes: dict[StreamId, Namespace] = {}
        self._views: dict[StreamId, View] = {}
        self._groups_of: dict[NamespaceKey, dict[str, Namespace]] = {}  # also of namespaces that are not there (yet)

    def __iter__(self) -> Iterator[Namespace]:
        return iter(self._namespaces.values())

    @property
    def views(self) -> list[View]:
        """Every view."""
        return list(self._views.values())

    def view(self, stream: StreamId) -> View | None:
        """The view of a stream, if it is known."""
        return self._views.get(stream)

    def block_size(self, stream: StreamId) -> int:
        """Tokens a page of a known stream."""
        return self._homes[stream].key.block_size

    def find(self, model: str, tenant: str) -> list[Namespace]:
        """The namespaces of a model and tenant, one for each block size that workers use."""
        return [n for n in self._namespaces.values() if n.key.model == model and n.key.tenant == tenant]

    def is_group(self, namespace: Namespace) -> bool:
        """Whether it is of a group of a namespace that is there, too."""
        base, group = _base_key(namespace.key)
        return group is not None and base in self._namespaces

    def add_view(self, stream: StreamId, block_size: int) -> View:
        """A new, empty view. Raises IndexFullError when a bound of the settings is met."""
        namespace = self.add_namespace(stream.model, stream.tenant, block_size)
        view = View(stream, namespace.index, namespace.index.add_stream())
        self.adopt(namespace, view)
        return view

    def adopt(self, namespace: Namespace, view: View) -> None:
        """Take up a view whose stream number the namespace's index knows already."""
        namespace.views[view.number] = view
        namespace.by_rank[view.stream.worker, view.stream.dp_rank] = view
        self._homes[view.stream], self._views[view.stream] = namespace, view

    def add_namespace(self, model: str, tenant: str, block_size: int) -> Namespace:
        """The namespace, made when it is new. Raises IndexFullError when there are too many."""
        key = NamespaceKey(model, tenant, block_size)
        namespace = self._namespaces.get(key)
        if namespace is None:
            if len(self._namespaces) == self._settings.max_namespaces:
                raise self._too_many_namespaces()
            index = OverlapIndex(self._settings.max_pages, self._settings.max_streams, self._settings.max_set_bytes)
            namespace = self._namespaces[key] = Namespace(key, index, groups=self._groups_of.setdefault(key, {}))
            base, group = _base_key(key)
            if group is not None:
                self._groups_of.setdefault(base, {})[group] = namespace
        return namespace

    def check_room(self, expected: Mapping[StreamId, int]) -> None:
        """Whether these streams' views, too, could be here together. expected: stream -> block size.

        Raises IndexFullError.
        """
        streams = {key: {view.stream for view in each.views.values()} for key, each in self._namespaces.items()}
        for stream, block_size in expected.items():
            streams.setdefault(NamespaceKey(stream.model, stream.tenant, block_size), set()).add(stream)
        if len(streams) > self._settings.max_namespaces:
            raise self._too_many_namespaces()
        if max(map(len, streams.values()), default=0) > self._settings.max_streams:
            raise IndexFullError("worker streams of a namespace (KVSIGHT_MAX_STREAMS)", self._settings.max_streams)

    def _too_many_namespaces(self) -> IndexFullError:
        return IndexFullError("namespaces (KVSIGHT_MAX_NAMESPACES)", self._settings.max_namespaces)

    def forget(self, stream: StreamId) -> Iterator[None]:
        """Drop a view and its pages, slice by slice; a namespace without views goes too.

        A view of which something stays (see `OverlapIndex.remove`) stays itself, and can be forgotten later.
        """
        namespace, view = self._homes[stream], self._views[stream]
        yield from view.clear()
        if any(view.num_pages):
            return
        namespace.index.drop_stream(view.number)
        del namespace.views[view.number], self._homes[stream], self._views[stream]
        del namespace.by_rank[stream.worker, stream.dp_rank]
        if not namespace.views:
            del self._namespaces[namespace.key]
            self._drop_groups_of(namespace.key)

    def _drop_groups_of(self, gone: NamespaceKey) -> None:
        """A namespace is gone, and with it what knew of its groups, unless some of them are left."""
        base, group = _base_key(gone)
        if group is not None:
            del self._groups_of[base][group]
        for key in (base, gone):
            if key not in self._namespaces and not self._groups_of.get(key, True):
                del self._groups_of[key]


def _base_key(key: NamespaceKey) -> tuple[NamespaceKey, str | None]:
    """The namespace that this one is a group of, and which; itself and None if it is none."""
    model, group = split_group(key.model)
    return key._replace(model=model), group
