"""Scores: the tokens of a prompt that each worker can reuse, by cumulative tier, in one namespace or several.

What can be reused of what a worker holds is decided by its group streams, see `indexer.kernels.reuse`.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from operator import is_not
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from indexer.freshness import Freshness
from indexer.index import Matches
from indexer.kernels.reuse import KINDS, NO_STREAM, UNKNOWN, Groups, GroupSpace, shorten
from indexer.kernels.views import NUM_NUMBERS
from indexer.namespaces import KeptGroups, Namespace
from indexer.views import STATES, View, ViewState, least_trusted
from kv_events.hashing import U64Array
from kv_events.kernels.arrays import zeros
from kv_events.kernels.bundles import pin
from kv_events.limits import MAX_HASHES_PER_QUERY, MAX_TOKENS_PER_QUERY
from kv_events.schema import NUM_MEDIA
from kv_events.streams import Group, parse_group

_NO_FULL = "nofull"


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
    """What the streams of a match can reuse. Valid until the next call."""

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
    """Shorten matches to what the engines can reuse, see the kernel `shorten`. Overwrites `matches.pages`.

    hashes: uint64[n], C order. matches: the result of the main namespace. num_positions: tokens of the prompt; None:
    not known. only: names of the groups that count; None: all.
    """
    kept = groups_of(namespace) if only is None else _groups(namespace, only)
    num_found, streams = len(matches.streams), np.empty(len(matches.pages), np.int32)
    streams[:num_found] = matches.streams
    prompt = namespace.key.block_size, UNKNOWN if num_positions is None else num_positions
    num_left = shorten(kept.pinned, hashes, prompt, freshness.bounds(), streams, num_found, matches.pages)
    return Reuse(Matches(streams[:num_left], matches.pages), kept.groups.states)


def groups_of(namespace: Namespace) -> KeptGroups:
    """Return the groups of a namespace for kernels: the same object until anything has changed."""
    if not namespace.groups:
        return _NO_GROUPS
    kept, groups = namespace.kept_groups, namespace.groups.values()
    changes = namespace.num_changes, *(group.num_changes for group in groups)
    if kept is None or kept.changes != changes or any(map(is_not, kept.pages, (group.index.pages for group in groups))):
        kept = namespace.kept_groups = _groups(namespace, namespace.groups)
    return kept


def _groups(namespace: Namespace, names: Collection[str]) -> KeptGroups:
    groups = {name: group for name, group in namespace.groups.items() if name in names}
    block_size = namespace.key.block_size
    spaces = [pin(_space(group, namespace)) for group in groups.values()]
    rules = [_rule(parse_group(name), block_size) for name in groups]
    num_pages = max(MAX_HASHES_PER_QUERY, MAX_TOKENS_PER_QUERY // block_size)
    bundle = _bundle(spaces, rules, namespace.columns.numbers, namespace.index.most_streams, num_pages)
    changes = namespace.num_changes, *(group.num_changes for group in groups.values())
    return KeptGroups(changes, [group.index.pages for group in groups.values()], spaces, bundle, pin(bundle))


def _bundle(
    spaces: list[GroupSpace],
    rules: list[tuple[int, int, int]],
    numbers: npt.NDArray[np.int64],
    num_streams: int,
    num_pages: int,
) -> Groups:
    return Groups(
        spaces=np.array(spaces, np.uint64).reshape(len(spaces), -1 if spaces else 0),
        rules=np.array(rules, np.int64).reshape(-1, 3),
        numbers=numbers,
        states=np.zeros(num_streams, np.uint8),
        is_found=np.zeros(num_streams, np.bool_),
        members=np.zeros(len(rules), np.int64),
        lengths=np.zeros(NUM_MEDIA, np.int64),
        sets=zeros((len(rules), num_pages), np.uint32),
        num_looked_up=np.zeros(len(rules), np.int64),
    )


_NOTHING = _bundle([], [], np.zeros((0, NUM_NUMBERS), np.int64), 0, 0)
_NO_GROUPS = KeptGroups((), [], [], _NOTHING, pin(_NOTHING))


def _space(group: Namespace, namespace: Namespace) -> GroupSpace:
    members = np.full(namespace.index.most_streams, NO_STREAM, np.int64)
    for number, view in namespace.views.items():
        if in_group := group.by_rank.get(_rank(view)):
            members[number] = in_group.number
    pages, columns = group.index.pages, group.columns
    state = columns.states, columns.faults, columns.last_batch_tick, columns.numbers
    return GroupSpace(pages.table, pages.holders, pages.sets.words, *state, members)


def _rule(group: Group, block_size: int) -> tuple[int, int, int]:
    """Return the row of `Groups.rules`."""
    block = max(1, group.block // block_size)
    size = {"swa": -(-group.size // (block * block_size)), "step": max(1, group.size // block_size), "mamba": 1}
    return KINDS.index(group.kind), size.get(group.kind, group.size), block


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


def _is_gone(view: View, in_group: View) -> bool:
    """Return whether an expired group stream belongs to an earlier life of its worker."""
    return in_group.is_closed or in_group.epoch < view.epoch


def _rank(view: View) -> tuple[str, int]:
    return view.stream.worker, view.stream.dp_rank
