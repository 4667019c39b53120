"""Kernels on the index of a group: find where a prefix can end for a worker that holds more than KV.

The index of a group holds the *marked* pages of each stream, by tier. The rules are those of `kv_events.streams.Group`.
"""

from indexer.kernels.apply import look_up
from indexer.kernels.find import PageLookup
from kv_events.kernels.bundles import I64Matrix, I64Vector, U32Vector, U64Input, U64Matrix
from kv_events.kernels.declare import helper, kernel
from kv_events.kernels.numbers import int64, uint32, uint64
from kv_events.schema import NUM_MEDIA

_EMPTY = uint64(0)


@kernel
def sets_of_pages(pages: PageLookup, hashes: U64Input, out_sets: U32Vector) -> None:
    """Look up the holder set of each page of a prompt, once for all streams.

    hashes: uint64[n], sequence hashes. out_sets: uint32[n], written; 0, the empty set, for pages without holders. The
    result is valid until the next change of the index.
    """
    entry = int64(-1)
    for i in range(hashes.shape[0]):
        entry = look_up(pages.table, pages.holders, entry, hashes[i])
        out_sets[i] = pages.holders[entry] if entry >= 0 else uint32(0)


@helper
def _is_marked(words: U64Matrix, held: int, stream: int, tier: int) -> bool:
    """Return whether a page is marked on this tier or a faster one."""
    width = words.shape[1] // NUM_MEDIA
    marks = _EMPTY
    for faster in range(tier + 1):
        marks |= words[held, faster * width + (stream >> 6)]
    return (marks >> uint64(stream & 63)) & uint64(1) != _EMPTY


@helper
def _end_of_window(
    words: U64Matrix,
    sets: U32Vector,
    stream: int,
    tier: int,
    window: int,
    block: int,
    step: int,
    behind: int,
    length: int,
) -> int:
    """Return the longest prefix, a multiple of `step`, around whose end all blocks are marked at their own ends.

    window: blocks before the end, or all if there are fewer. behind: pages after it, none or one block.
    """
    length -= length % step
    marked, end = 0, length + behind
    while length > 0 and end > 0 and marked < window + behind // block:
        if end <= sets.shape[0] and _is_marked(words, int64(sets[end - 1]), stream, tier):
            marked += 1
            end -= block
        else:
            length = max(int64(0), end - block - behind)
            length -= length % step
            marked, end = 0, length + behind
    return length


@helper
def _end_in_chunk(
    words: U64Matrix, sets: U32Vector, stream: int, tier: int, chunk: int, block_size: int, length: int
) -> int:
    """Return the longest prefix whose pages are marked since its chunk began. chunk: units. block_size: of a page."""
    for i in range(length * block_size // chunk * chunk // block_size, length):
        if not _is_marked(words, int64(sets[i]), stream, tier):
            return i
    return length


@kernel
def trim_to_reusable(
    words: U64Matrix,
    sets: U32Vector,
    streams: I64Vector,
    rule: tuple[int, int, int, int],
    steps: I64Vector,
    behind: I64Vector,
    lengths: I64Matrix,
) -> bool:
    """Shorten prefixes until each one ends at a page where it can end. Returns whether any prefix became shorter.

    words: uint64[sets, 4 * width]. sets: uint32[n], holder sets of the prompt's pages. streams: int64[k]; prefixes of
    stream -1 are not changed. rule: window in blocks, pages a block, units of a chunk (0: the window decides), units a
    page. steps: int64[k], pages of which each prefix is a multiple. behind: int64[k], 1 where a block behind the window
    must be held, too, else 0. lengths: int64[k, 4], updated: pages of each stream's prefix by tier, at most n.
    """
    window, block, chunk, block_size = rule
    has_changed = False
    for k in range(streams.shape[0]):
        if streams[k] < 0:
            continue
        for tier in range(NUM_MEDIA):
            length = lengths[k, tier]
            if chunk > 0:
                shorter = _end_in_chunk(words, sets, streams[k], tier, chunk, block_size, length)
                shorter -= shorter % steps[k]
            else:
                shorter = _end_of_window(
                    words, sets, streams[k], tier, window, block, steps[k], behind[k] * block, length
                )
            has_changed |= shorter < length
            lengths[k, tier] = shorter
    return has_changed
