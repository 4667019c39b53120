"""The kernel that shortens what streams hold of a prompt to what their engines can reuse.

Full KV can be reused at every page, a recurrent state only after the page at whose end it was taken, and a sliding
window only if it is complete. Workers publish their states and windows in group streams (see `kv_events.streams`), each
of which has its own index, with the *marked* pages by tier. The rules are those of vLLM's `find_longest_cache_hit`;
engines with other rules publish what makes them equal.
"""

from typing import NamedTuple

from indexer.kernels.find import put_sets_of_pages
from indexer.kernels.views import EPOCH, EXPIRED, FAULT_CLOSED, shown_state
from kv_events.kernels.bundles import (
    BoolVector,
    F64Vector,
    I32Vector,
    I64Matrix,
    I64Vector,
    U8Vector,
    U32Matrix,
    U32Vector,
    U64Input,
    U64Matrix,
    reader,
)
from kv_events.kernels.declare import helper, inline_helper, kernel
from kv_events.kernels.numbers import int32, int64, uint8, uint32, uint64
from kv_events.kernels.page_table import Table
from kv_events.schema import NUM_MEDIA

KINDS = ("mamba", "swa", "chunk", "step", "eagle", "nofull")
"""Kinds of groups, see `kv_events.streams.Group`. Pages are marked in the first three."""
MAMBA, SWA, CHUNK, STEP, EAGLE, NO_FULL = range(len(KINDS))
KIND, SIZE, BLOCK = range(3)
"""Columns of `Groups.rules`."""

NO_STREAM = UNKNOWN = -1
_MAX_ROUNDS = 256
"""Engines need a few. A stream that needs more can reuse nothing, so that it cannot make queries slow."""
_EMPTY = uint64(0)


class GroupSpace(NamedTuple):
    """The index and the views of a group."""

    table: Table
    holders: U32Vector
    words: U64Matrix
    states: U8Vector
    """[streams of the group], as the next three: see `ViewColumns`."""
    faults: U8Vector
    last_batch_tick: F64Vector
    numbers: I64Matrix
    members: I64Vector
    """[streams] number of each stream of the namespace in the group, -1: it is not in it."""


class Groups(NamedTuple):
    """The groups of a namespace, and room to find what its streams can reuse."""

    spaces: U64Matrix
    """[groups, words] the pinned `GroupSpace` of each one."""
    rules: I64Matrix
    """[groups, 3] kind; blocks of a window, pages of a step or units of a chunk; pages of a block."""
    numbers: I64Matrix
    """`ViewColumns.numbers` of the namespace."""
    states: U8Vector
    """[streams] output: position in `ViewState` of the least trusted group stream of each stream; 0 without one."""
    is_found: BoolVector
    """[streams] scratch"""
    members: I64Vector
    """[groups] scratch: number of a stream in each group, -1: it is not in it."""
    lengths: I64Vector
    """[4] scratch: pages by tier."""
    sets: U32Matrix
    """[groups, pages] scratch: holder sets of the pages of a prompt."""
    num_looked_up: I64Vector
    """[groups] scratch: pages whose sets are known."""


class _Demands(NamedTuple):
    """What the groups of a stream demand together."""

    has_groups: bool
    has_marks: bool
    """Whether pages are marked in a group."""
    is_unlimited: bool
    """Whether the engine has no full attention, so that every page counts as held."""
    is_lost: bool
    """Whether a group stream has expired."""
    recomputed: int
    """1 for EAGLE."""
    step: int
    """Pages of which every prefix is a multiple."""


_read_space = reader(GroupSpace)


@helper
def _join(groups: Groups, stream: int, bounds: tuple[float, float, float]) -> _Demands:
    """Write the numbers of a stream in its groups, and its state. Returns what they demand.

    A group stream that was closed, or that has expired since the worker began a newer epoch, does not count: the engine
    came back without the group.
    """
    has_groups = has_marks = is_unlimited = is_lost = False
    recomputed, step, worst = int64(0), int64(1), uint8(0)
    for group in range(groups.rules.shape[0]):
        space, kind = _read_space(groups.spaces[group]), groups.rules[group, KIND]
        member = space.members[stream]
        if member != NO_STREAM:
            state = shown_state(space.states, space.faults, space.last_batch_tick, member, bounds)
            is_older = space.numbers[member, EPOCH] < groups.numbers[stream, EPOCH]
            if state == EXPIRED and (space.faults[member] == FAULT_CLOSED or is_older):
                member = int64(NO_STREAM)
            else:
                has_groups, is_lost, worst = True, is_lost or state == EXPIRED, max(worst, state)
                has_marks |= kind <= CHUNK
                is_unlimited |= kind == NO_FULL
                recomputed = int64(1) if kind == EAGLE else recomputed
                step = groups.rules[group, SIZE] if kind == STEP else step
        groups.members[group] = member
    groups.states[stream] = worst
    return _Demands(has_groups, has_marks, is_unlimited, is_lost, recomputed, step)


@inline_helper
def _is_marked(words: U64Matrix, held: int, member: int, tier: int) -> bool:
    """Return whether a page is marked on this tier or a faster one."""
    width = words.shape[1] // NUM_MEDIA
    marks = _EMPTY
    for faster in range(tier + 1):
        marks |= words[held, faster * width + (member >> 6)]
    return (marks >> uint64(member & 63)) & uint64(1) != _EMPTY


@helper
def _end_of_window(
    words: U64Matrix,
    sets: U32Vector,
    place: tuple[int, int],
    window: tuple[int, int, int],
    num_pages: int,
    step: int,
    length: int,
) -> int:
    """Return the longest prefix, a multiple of `step`, around whose end all blocks are marked at their own ends.

    place: number in the group, tier. window: blocks before the end, or all if there are fewer; pages of a block; pages
    after the end, none or one block. num_pages: of the prompt.
    """
    (member, tier), (num_blocks, block, behind) = place, window
    length -= length % step
    marked, end, held, is_marked = 0, length + behind, int64(-1), False
    while length > 0 and end > 0 and marked < num_blocks + behind // block:
        if end <= num_pages and sets[end - 1] != held:  # pages that were stored together have one set
            held = int64(sets[end - 1])
            is_marked = _is_marked(words, held, member, tier)
        if end <= num_pages and is_marked:
            marked += 1
            end -= block
        else:
            length = max(int64(0), end - block - behind)
            length -= length % step
            marked, end = 0, length + behind
    return length


@helper
def _end_in_chunk(
    words: U64Matrix, sets: U32Vector, place: tuple[int, int], chunk: int, block_size: int, step: int, length: int
) -> int:
    """Return the longest prefix whose pages are marked since its chunk began. chunk: units. block_size: of a page."""
    member, tier = place
    for i in range(length * block_size // chunk * chunk // block_size, length):
        if not _is_marked(words, int64(sets[i]), member, tier):
            return i - i % step
    return length


@helper
def _shorten_by(groups: Groups, group: int, hashes: U64Input, demands: _Demands, block_size: int) -> bool:
    """Shorten the prefixes of a stream until one group allows their ends. Returns whether any became shorter."""
    space, lengths, member = _read_space(groups.spaces[group]), groups.lengths, groups.members[group]
    kind, size, block = groups.rules[group, KIND], groups.rules[group, SIZE], groups.rules[group, BLOCK]
    sets, known, has_changed = groups.sets[group], groups.num_looked_up[group], False
    longest = int64(0)  # of any tier: windows of large blocks may leave a slower one with a shorter prefix
    for tier in range(NUM_MEDIA):
        longest = max(longest, lengths[tier])
    needed = min(hashes.shape[0], longest + block)
    if needed > known:
        put_sets_of_pages(space.table, space.holders, hashes[known:needed], sets[known:needed])
        groups.num_looked_up[group] = needed
    behind = demands.recomputed * block if kind == SWA else int64(0)
    for tier in range(NUM_MEDIA):
        place, length = (member, int64(tier)), lengths[tier]
        if kind == CHUNK:
            lengths[tier] = _end_in_chunk(space.words, sets, place, size, block_size, demands.step, length)
        else:
            window = (size, block, behind)
            lengths[tier] = _end_of_window(
                space.words, sets, place, window, int64(hashes.shape[0]), demands.step, length
            )
        has_changed |= lengths[tier] < length
    return has_changed


@helper
def _agree(groups: Groups, hashes: U64Input, demands: _Demands, block_size: int) -> None:
    """Shorten the prefixes of a stream until all its groups allow them to end at the same page."""
    for _ in range(_MAX_ROUNDS):
        has_changed = False
        for group in range(groups.rules.shape[0]):
            if groups.rules[group, KIND] <= CHUNK and groups.members[group] != NO_STREAM:
                has_changed |= _shorten_by(groups, group, hashes, demands, block_size)
        if not has_changed:
            return
    groups.lengths[:] = 0


@kernel
def shorten(
    groups: Groups,
    hashes: U64Input,
    prompt: tuple[int, int],
    bounds: tuple[float, float, float],
    streams: I32Vector,
    found: int,
    pages: U32Matrix,
) -> int:
    """Shorten what streams hold of a prompt to what their engines can reuse.

    Streams without groups are not changed. An expired group stream counts as empty. hashes: uint64[n], of the prompt's
    pages. prompt: units of a page, and units of the prompt, of which an engine computes the last one in any case;
    UNKNOWN: not known. bounds: `Freshness.bounds`. streams: int32[streams], of which the first `found` were found;
    updated, ascending. pages: uint32[streams, 4], updated. Returns the number of streams that can reuse anything.
    """
    (block_size, num_units), lengths, num_left = prompt, groups.lengths, int64(0)
    most = int64(hashes.shape[0]) if num_units == UNKNOWN else max(int64(0), num_units - 1) // block_size
    groups.num_looked_up[:] = 0
    groups.is_found[:] = False
    for i in range(found):
        groups.is_found[streams[i]] = True
    for stream in range(groups.is_found.shape[0]):
        demands = _join(groups, int64(stream), bounds)
        if not (groups.is_found[stream] or demands.is_unlimited):
            continue
        for tier in range(NUM_MEDIA):
            held = int64(hashes.shape[0]) if demands.is_unlimited else int64(pages[stream, tier])
            held = int64(0) if demands.is_lost else held
            if demands.recomputed > 0 and not demands.has_marks:  # hybrid engines look one block further
                held = min(held, most)
            held -= demands.recomputed
            held = max(int64(0), min(held, most) if demands.has_groups else held)
            lengths[tier] = held - held % demands.step
        if demands.has_marks:
            _agree(groups, hashes, demands, block_size)
        for tier in range(NUM_MEDIA):
            pages[stream, tier] = uint32(lengths[tier])
        if lengths[NUM_MEDIA - 1] > 0:
            streams[num_left] = int32(stream)
            num_left += 1
    return num_left
