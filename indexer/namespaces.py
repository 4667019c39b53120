"""All views by namespace, with one index for each (model, tenant, block size).

Namespaces of group streams are attached to the namespace of their model, in whichever order they are created.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from indexer.index import IndexFullError, OverlapIndex
from indexer.kernels.apply import Pages
from indexer.kernels.reuse import Groups, GroupSpace
from indexer.kernels.views import ViewColumns
from indexer.settings import IndexerSettings
from indexer.views import View, make_columns
from kv_events.streams import StreamId, split_group

_MAX_REFUSED = 4096


class NamespaceKey(NamedTuple):
    """Identity of a namespace."""

    model: str
    tenant: str
    block_size: int


@dataclass(slots=True, eq=False, weakref_slot=True)
class Namespace:
    """One index with its views."""

    key: NamespaceKey
    index: OverlapIndex
    columns: ViewColumns = field(repr=False)
    """State and times of the views."""
    num_changes: int = 0
    """Views added and dropped so far."""
    views: dict[int, View] = field(default_factory=dict)
    """Views by the stream number of the index."""
    by_rank: dict[tuple[str, int], View] = field(default_factory=dict)
    """Views by worker and DP rank."""
    groups: dict[str, Namespace] = field(default_factory=dict, repr=False)
    """Namespaces of its group streams, of the same tenant and block size."""
    kept_groups: KeptGroups | None = field(default=None, repr=False)
    """What `indexer.scores` keeps of them."""


class KeptGroups(NamedTuple):
    """The groups of a namespace for kernels."""

    changes: tuple[int, ...]
    """`num_changes` of the namespace and of the groups when this was made."""
    pages: list[Pages]
    """Of the groups' indexes, then."""
    spaces: list[GroupSpace]
    """Those of `groups`, which has only their addresses."""
    groups: Groups
    pinned: Groups


class RefusedStream(NamedTuple):
    """A stream that gets no view, as of its newest batch."""

    reason: str
    block_size: int
    epoch: int
    seq: int
    last_batch_at: float
    """Seconds since 1970."""
    last_batch_tick: float
    """The same on the clock of `Freshness`."""


class Namespaces:
    """Every view of this process. One thread writes and reads."""

    def __init__(self, settings: IndexerSettings | None = None) -> None:
        self._settings = settings or IndexerSettings()
        self._namespaces: dict[NamespaceKey, Namespace] = {}
        self._found: dict[tuple[str, str | None], list[Namespace]] = {}  # by tenant, and by tenant and model
        self._views: dict[StreamId, View] = {}
        self.refused: dict[StreamId, RefusedStream] = {}
        """Streams without a view, the first ones if there are very many."""
        self.num_dropped = 0
        """Views that were dropped so far."""

    def __iter__(self) -> Iterator[Namespace]:
        return iter(self._namespaces.values())

    @property
    def num_namespaces(self) -> int:
        return len(self._namespaces)

    @property
    def views(self) -> list[View]:
        return list(self._views.values())

    def view(self, stream: StreamId) -> View | None:
        return self._views.get(stream)

    def _home(self, view: View) -> Namespace:
        return self._namespaces[NamespaceKey(view.stream.model, view.stream.tenant, view.block_size)]

    def group_views(self, stream: StreamId) -> dict[str, View]:
        """Return the group streams of a known stream, by the name of the group."""
        groups = self._home(self._views[stream]).groups
        found = {name: group.by_rank.get(stream[2:]) for name, group in groups.items()}
        return {name: view for name, view in sorted(found.items()) if view is not None}

    def find(self, model: str, tenant: str) -> Sequence[Namespace]:
        """Return the namespaces of a model and tenant, one for each block size that workers use."""
        return self._found.get((tenant, model), ())

    def of_tenant(self, tenant: str) -> Sequence[Namespace]:
        """Return all namespaces of a tenant, with those of groups."""
        return self._found.get((tenant, None), ())

    def num_streams(self, tenant: str) -> int:
        return sum(len(namespace.views) for namespace in self.of_tenant(tenant))

    def num_pages(self, tenant: str) -> int:
        return sum(namespace.index.num_pages for namespace in self.of_tenant(tenant))

    @property
    def tenants(self) -> list[str]:
        """Tenants that have a view."""
        return [tenant for tenant, model in self._found if model is None]

    def refuse(self, stream: StreamId, refused: RefusedStream) -> bool:
        """Note that a stream gets no view. Returns whether this is news."""
        is_new = stream not in self.refused
        if not is_new or len(self.refused) < _MAX_REFUSED:
            self.refused[stream] = refused
        return is_new

    def drop_refused(self, before: float) -> None:
        """Drop the notes of refused streams that were heard last before a time on the clock of `Freshness`."""
        for stream in [stream for stream, each in self.refused.items() if each.last_batch_tick < before]:
            del self.refused[stream]

    def is_group(self, namespace: Namespace) -> bool:
        """Return whether the namespace is that of a group whose model has a namespace, too."""
        base, group = _base_key(namespace.key)
        return group is not None and base in self._namespaces

    def make_room(self, stream: StreamId, block_size: int) -> Iterator[None]:
        """Prepare `add_view`, in slices. See `OverlapIndex.make_room`."""
        namespace = self._namespaces.get(NamespaceKey(stream.model, stream.tenant, block_size))
        if namespace is not None:
            yield from namespace.index.make_room()

    def add_view(self, stream: StreamId, block_size: int) -> View:
        """Create an empty view. Raises IndexFullError if a limit of the settings is reached."""
        namespace = self.add_namespace(stream.model, stream.tenant, block_size)
        view = View(stream, block_size, namespace.index, namespace.index.add_stream(), namespace.columns)
        self.adopt(namespace, view)
        return view

    def adopt(self, namespace: Namespace, view: View) -> None:
        """Add a view whose stream number the index of the namespace already knows."""
        self.refused.pop(view.stream, None)
        namespace.num_changes += 1
        namespace.views[view.number] = view
        namespace.by_rank[view.stream.worker, view.stream.dp_rank] = view
        self._views[view.stream] = view

    def add_namespace(self, model: str, tenant: str, block_size: int) -> Namespace:
        """Return the namespace, and create it if it is new. Raises IndexFullError if there are too many."""
        key = NamespaceKey(model, tenant, block_size)
        namespace = self._namespaces.get(key)
        if namespace is None:
            if len(self._namespaces) == self._settings.max_namespaces:
                raise self._too_many_namespaces()
            index = OverlapIndex(self._settings.max_pages, self._settings.max_streams, self._settings.max_set_bytes)
            columns = make_columns(self._settings.max_streams)
            namespace = self._namespaces[key] = Namespace(key, index, columns)
            for name in (None, model):
                self._found.setdefault((tenant, name), []).append(namespace)
            self._link_groups(namespace)
        return namespace

    def _link_groups(self, new: Namespace) -> None:
        """Add a namespace to the groups of its model, or the groups that exist to it."""
        for namespace in self.of_tenant(new.key.tenant):
            base, group = _base_key(namespace.key)
            if group is not None and new.key in (base, namespace.key) and base in self._namespaces:
                self._namespaces[base].groups[group] = namespace

    def check_room(self, expected: Mapping[StreamId, int]) -> None:
        """Check that there is room for the views of these streams, too. expected: stream -> block size. Raises
        IndexFullError.
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
        """Drop a view and its pages, slice by slice. A namespace without views is dropped, too.

        If pages of the view cannot be removed (see `OverlapIndex.remove`), the view stays and can be dropped later.
        """
        view = self._views[stream]
        namespace = self._home(view)
        yield from view.clear()
        if any(view.num_pages):
            return
        namespace.index.drop_stream(view.number)
        namespace.num_changes += 1
        self.num_dropped += 1
        del namespace.views[view.number], self._views[stream], namespace.by_rank[stream.worker, stream.dp_rank]
        if not namespace.views:
            self._drop_namespace(namespace)

    def _drop_namespace(self, namespace: Namespace) -> None:
        del self._namespaces[namespace.key]
        model, tenant, _ = namespace.key
        for key in ((tenant, None), (tenant, model)):
            self._found[key].remove(namespace)
            if not self._found[key]:
                del self._found[key]
        base, group = _base_key(namespace.key)
        if group is not None and (home := self._namespaces.get(base)) is not None:
            del home.groups[group]


def _base_key(key: NamespaceKey) -> tuple[NamespaceKey, str | None]:
    """Return the namespace of the model and the group, or the namespace itself and None if it has no group."""
    model, group = split_group(key.model)
    return key._replace(model=model), group
