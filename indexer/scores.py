"""Scores: the tokens of a prompt that each worker can reuse, by cumulative tier, in one namespace or several.

Full KV can be reused at every page, a recurrent state only after the page at whose end it was taken, and a sliding
window only if it is complete. Workers publish their states and windows in group streams (see `kv_events.streams`), each
of which has its own index. The rules are those of vLLM's `find_longest_cache_hit`; engines with other rules publish
what makes them equal.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from indexer.freshness import Freshness
from indexer.index import Matches
from indexer.namespaces import GroupStreams, Namespace
from indexer.views import STATES, View, ViewState, least_trusted
from kv_events.hashing import U64Array
from kv_events.streams import Group, parse_group

_NO_STREAM = -1
_NO_FULL = "nofull"
_MAX_ROUNDS = 256
"""Engines need a few. A stream that needs more gets no score, so that it cannot make queries slow."""
_EXPIRED = STATES.index(ViewState.EXPIRED)

_Trim = Callable[[npt.NDArray[np.int64]], bool]


class TierTokens(NamedTuple):
    """Tokens of a prompt's longest reusable prefix on a tier or a faster one: gpu <= cpu <= disk <= external."""

    gpu: int
    cpu: int
    disk: int
    external: int

    def weighted(self, weights: Sequence[float]) -> float:
        """Return the tokens, each weighted by the fastest tier that reaches it. weights: 4, fastest tier first."""
        gpu, cpu, disk, external = weights
        return (
            self.gpu * gpu
            + (self.cpu - self.gpu) * cpu
            + (self.disk - self.cpu) * disk
            + (self.external - self.disk) * external
        )


class StreamScore(NamedTuple):
    """The part of a prompt that one DP rank can reuse."""

    worker: str
    dp_rank: int
    tiers: TierTokens
    state: ViewState
    """The state to show."""
    last_batch_at: float
    """See `View.last_batch_at`."""
    partition: int
    """See `View.partition`."""


class WorkerScore(NamedTuple):
    """The part of a prompt that one worker can reuse."""

    worker: str
    tiers: TierTokens
    """Best over the worker's ranks, tier by tier."""
    ranks: dict[int, TierTokens]
    """Tokens by DP rank."""
    state: ViewState
    """The least trustworthy state among the ranks that count."""
    last_batch_at: float
    """The oldest `View.last_batch_at` among the ranks."""

    @property
    def longest_matched(self) -> int:
        """Tokens that can be reused from any tier."""
        return self.tiers.external


def stream_scores(
    namespace: Namespace, hashes: U64Array, freshness: Freshness, num_positions: int | None = None
) -> list[StreamScore]:
    """Return the scores of all streams that can reuse a page of the prompt from any tier, except expired ones.

    hashes: uint64[n], C order, sequence hashes of the prompt's complete pages. num_positions: see `reusable`.
    """
    matches = namespace.index.find(hashes)
    group_states = None
    if namespace.groups:
        matches, group_states = reusable(namespace, hashes, matches, freshness, num_positions)
    block_size = namespace.key.block_size
    rows = matches.pages[matches.streams].tolist()
    scores = []
    for number, row in zip(matches.streams.tolist(), rows, strict=True):
        view = namespace.views[number]
        state = freshness.state(view)
        if group_states is not None:
            state = least_trusted((state, STATES[group_states[number]]))
        if state is not ViewState.EXPIRED:
            tokens = TierTokens(*[pages * block_size for pages in row])
            stream = view.stream
            scores.append(StreamScore(stream.worker, stream.dp_rank, tokens, state, view.last_batch_at, view.partition))
    return scores


def worker_scores(streams: Iterable[StreamScore]) -> list[WorkerScore]:
    """Return one score for each worker of some streams, whatever their block sizes are."""
    by_worker: dict[str, list[StreamScore]] = {}
    for stream in streams:
        by_worker.setdefault(stream.worker, []).append(stream)
    return [_worker_score(worker, ranks) for worker, ranks in by_worker.items()]


def _worker_score(worker: str, ranks: list[StreamScore]) -> WorkerScore:
    if len(ranks) == 1:
        (only,) = ranks
        return WorkerScore(worker, only.tiers, {only.dp_rank: only.tiers}, only.state, only.last_batch_at)
    return WorkerScore(
        worker,
        TierTokens(*(max(column) for column in zip(*(each.tiers for each in ranks), strict=True))),
        {each.dp_rank: each.tiers for each in ranks},
        least_trusted(each.state for each in ranks),
        min(each.last_batch_at for each in ranks),
    )


def score_all(
    namespaces: Iterable[Namespace],
    hashes: Callable[[int], U64Array],
    freshness: Freshness,
    num_positions: int | None = None,
) -> list[WorkerScore]:
    """Return one score for each worker, even if its ranks use different block sizes.

    hashes: block size -> uint64[pages], the prompt's sequence hashes. num_positions: see `reusable`.
    """
    return worker_scores(
        stream
        for namespace in namespaces
        for stream in stream_scores(namespace, hashes(namespace.key.block_size), freshness, num_positions)
    )


class Reuse(NamedTuple):
    """What the streams of a match can reuse."""

    matches: Matches
    """The streams that can reuse anything, with the pages that they can reuse, by tier."""
    states: npt.NDArray[np.uint8]
    """[streams] position in `ViewState` of the least trusted group stream of each stream; 0 for those without."""


def reusable(
    namespace: Namespace,
    hashes: U64Array,
    matches: Matches,
    freshness: Freshness,
    num_positions: int | None,
    only: Collection[str] | None = None,
) -> Reuse:
    """Shorten matches to what the engines can reuse. Overwrites `matches.pages`.

    An expired group stream counts as empty. Streams without groups are not changed. hashes: uint64[n], C order.
    matches: the result of the main namespace. num_positions: tokens of the prompt, of which an engine computes the last
    one in any case; None: not known. only: names of the groups that count; None: all.
    """
    groups = {name: group for name, group in namespace.groups.items() if only is None or name in only}
    found = matches.streams
    if _NO_FULL in groups:
        found = _with_unlimited(namespace, len(hashes), matches, freshness)
    rules = _Rules(len(found), namespace.key.block_size)
    states = np.zeros(len(matches.pages), np.uint8)
    lengths = matches.pages[found].astype(np.int64)
    for name, group in groups.items():
        streams = _streams_in(namespace, name, group, freshness)[found]
        has_group = streams != _NO_STREAM
        group_states = np.where(has_group, freshness.states(group.columns, streams), 0).astype(np.uint8)
        lengths[group_states == _EXPIRED] = 0
        states[found] = np.maximum(states[found], group_states)
        rules.add(parse_group(name), group, streams)
    rules.trim(lengths, hashes, num_positions)
    matches.pages[found] = lengths
    return Reuse(Matches(found[lengths[:, -1] > 0], matches.pages), states)


def _with_unlimited(
    namespace: Namespace, num_pages: int, matches: Matches, freshness: Freshness
) -> npt.NDArray[np.int32]:
    """Return the found streams and those without full attention, for which every page counts as held."""
    streams = _streams_in(namespace, _NO_FULL, namespace.groups[_NO_FULL], freshness)
    unlimited = np.flatnonzero(streams != _NO_STREAM).astype(np.int32)
    matches.pages[unlimited] = num_pages
    return np.union1d(matches.streams, unlimited)


class StreamReuse(NamedTuple):
    """What one stream can reuse of a prompt, and which group decides it."""

    lengths: tuple[int, ...]
    """[4] pages by tier."""
    ends: dict[str, int]
    """Group -> pages that it alone would allow, on any tier, if the prompt went on."""
    has_full: bool
    """Whether the engine has full attention."""
    expired: frozenset[str]
    """Groups whose streams have expired."""


def stream_reuse(
    namespace: Namespace, view: View, hashes: U64Array, freshness: Freshness, num_positions: int | None
) -> StreamReuse:
    """Explain what one stream can reuse. See `reusable`."""

    def lengths(names: Collection[str], num_positions: int | None = None) -> tuple[int, ...]:
        found = namespace.index.find(hashes)
        own = Matches(found.streams[found.streams == view.number], found.pages)
        own.pages[view.number] *= np.uint32(len(own.streams))  # `find` leaves the rows of other streams as they were
        reusable(namespace, hashes, own, freshness, num_positions, names)
        return tuple(own.pages[view.number].tolist())

    groups = {name: view_in for name, group in namespace.groups.items() if (view_in := group.by_rank.get(_rank(view)))}
    expired = {name for name, each in groups.items() if freshness.state(each) is ViewState.EXPIRED}
    groups = {name: each for name, each in groups.items() if name not in expired or not _is_gone(view, each)}
    unlimited = {_NO_FULL} & groups.keys()
    return StreamReuse(
        lengths(groups, num_positions),
        {name: lengths({name} | unlimited)[-1] for name in groups.keys() - unlimited},
        not unlimited,
        frozenset(expired & groups.keys()),
    )


class _Rules:
    """The rules of the groups of some streams."""

    def __init__(self, num_streams: int, block_size: int) -> None:
        self._block_size = block_size
        self._has_groups = np.zeros(num_streams, np.bool_)
        self._is_hybrid = np.zeros(num_streams, np.bool_)
        self._recomputed = np.zeros(num_streams, np.int64)  # 1 for EAGLE
        self._steps = np.ones(num_streams, np.int64)  # pages of which every prefix is a multiple
        self._groups: list[tuple[Group, Namespace, npt.NDArray[np.int64]]] = []

    def add(self, group: Group, namespace: Namespace, streams: npt.NDArray[np.int64]) -> None:
        """Add a group. streams: number of each stream in the group, or -1."""
        has_group = streams != _NO_STREAM
        self._has_groups |= has_group
        if group.kind == "eagle":
            self._recomputed[has_group] = 1
        elif group.kind == "step":
            self._steps[has_group] = max(1, group.size // self._block_size)
        elif group.kind != _NO_FULL:
            self._is_hybrid |= has_group
            self._groups.append((group, namespace, streams))

    def trim(self, lengths: npt.NDArray[np.int64], hashes: U64Array, num_positions: int | None) -> None:
        """Shorten prefixes until all groups allow them to end. lengths: [streams, 4] pages, updated."""
        eagle, has_groups = self._recomputed[:, np.newaxis] > 0, self._has_groups[:, np.newaxis]
        most = len(hashes) if num_positions is None else max(0, num_positions - 1) // self._block_size
        is_plain_eagle = eagle & ~self._is_hybrid[:, np.newaxis]
        np.minimum(lengths, most, out=lengths, where=is_plain_eagle)  # hybrid engines look one block further
        lengths -= self._recomputed[:, np.newaxis]
        np.clip(lengths, 0, np.where(has_groups, most, lengths), out=lengths)
        lengths -= lengths % self._steps[:, np.newaxis]
        longest = int(lengths.max(initial=0))
        steps = [self._step(*group, hashes, longest) for group in self._groups]
        for _ in range(_MAX_ROUNDS):  # all groups must allow a prefix to end at the same page
            before = lengths.copy()
            if not any([step(lengths) for step in steps]):  # noqa: C419  (all of them)
                return
        lengths[(lengths != before).any(axis=1)] = 0

    def _step(
        self, group: Group, namespace: Namespace, streams: npt.NDArray[np.int64], hashes: U64Array, longest: int
    ) -> _Trim:
        block = max(1, group.block // self._block_size)
        window = -(-group.size // (block * self._block_size)) if group.kind == "swa" else 1
        behind = self._recomputed if group.kind == "swa" else np.zeros_like(self._recomputed)
        holders = namespace.index.holders(hashes[: longest + block])
        rule = (window, block, group.size if group.kind == "chunk" else 0, self._block_size)
        return partial(namespace.index.trim_to_reusable, holders, streams, rule, self._steps, behind)


def _streams_in(namespace: Namespace, name: str, group: Namespace, freshness: Freshness) -> npt.NDArray[np.int64]:
    """Return int64[streams]: the number that each stream of the namespace has in its group, -1 if it has none.

    A group stream that was closed, or that has expired since the worker began a newer epoch, does not count: the engine
    came back without the group.
    """
    changes = (namespace.num_changes, group.num_changes)
    kept = namespace.group_streams.get(name)
    if kept is None or kept.changes != changes or kept.group is not group:
        streams = np.full(namespace.index.most_streams, _NO_STREAM, np.int64)
        for number, view in namespace.views.items():
            found = group.by_rank.get(_rank(view))
            streams[number] = _NO_STREAM if found is None else found.number
        kept = namespace.group_streams[name] = GroupStreams(group, changes, streams)
    streams = kept.streams
    ended = (streams != _NO_STREAM) & (freshness.states(group.columns, streams) == _EXPIRED)
    if ended.any():
        streams = streams.copy()
        for number in np.flatnonzero(ended).tolist():
            if _is_gone(namespace.views[number], group.views[int(streams[number])]):
                streams[number] = _NO_STREAM
    return streams


def _is_gone(view: View, in_group: View) -> bool:
    """Return whether an expired group stream belongs to an earlier life of its worker."""
    return in_group.is_closed or in_group.epoch < view.epoch


def _rank(view: View) -> tuple[str, int]:
    return view.stream.worker, view.stream.dp_rank
