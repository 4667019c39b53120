"""Where other prompts part from the one that is asked about, if records have tokens."""

from collections.abc import Iterator

import numpy as np

from kv_events.hashing import U32Array, U64Array
from kv_events.schema import PackedStored


def partings(event: PackedStored, tokens: U32Array, asked: U64Array, block_size: int) -> Iterator[tuple[int, int, int]]:
    """Yield where a store parts from a prompt. asked: uint64[pages] sequence hashes of the prompt's pages.

    Yields (page of the prompt, sequence hash of the page that was stored in its place, leading tokens that both pages
    have in common: at least one, and not all).
    """
    hashes, own = np.frombuffer(event.sequence_hashes, "<u8"), np.frombuffer(event.token_ids or b"", "<u4")
    if len(own) != len(hashes) * block_size:  # of pairs of tokens
        return
    starts = np.unpackbits(np.frombuffer(event.chain_starts, np.uint8), count=len(hashes), bitorder="little")
    before = np.concatenate((hashes[:1], hashes[:-1]))
    before[starts == 1] = np.frombuffer(event.parents, "<u8")
    follows = (np.isin(before, asked) | (before == 0)) & ~np.isin(hashes, asked)
    for place in np.flatnonzero(follows).tolist():
        page = int(np.argmax(asked == before[place])) + 1 if before[place] else 0
        wanted = tokens[page * block_size : (page + 1) * block_size]
        other = own[place * block_size : place * block_size + len(wanted)]
        common = int(np.argmin(np.append(other == wanted, [False])))
        if 0 < common < block_size:
            yield page, int(hashes[place]), common
