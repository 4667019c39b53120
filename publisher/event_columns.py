"""Validates engine events and converts them to columns for the ledger's kernels.

Invalid events raise `InvalidEventError` and nothing else. C loops (`array`, `itertools`) convert the engine's lists, so
that a page costs about ten nanoseconds and an event well below half a microsecond, even if each event carries one page.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from kv_events.errors import InvalidValueError, KvsightError
from kv_events.hashing import U32Array, U64Array, namespace_seed, sequence_hashes, token_array
from kv_events.limits import MAX_EXTRA_KEY_BYTES, MAX_HASHES_PER_QUERY
from kv_events.schema import MEDIUM_INDEX, BlockRemoved, BlockStored
from publisher.kernels.events import PageEvents

MAX_PAGES_PER_EVENT = MAX_HASHES_PER_QUERY

_MASK64 = 2**64 - 1
# if a C long has 64 bits, `array` converts to it three times as fast as to a long long
_SIGNED, _UNSIGNED = ("l", "L") if array("l").itemsize == 8 else ("q", "Q")


class InvalidEventError(KvsightError):
    """An engine event is invalid. `reason` is one of a small fixed set of words and can be used as a metric label."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


def medium_index(medium: Any) -> int:
    """Return the tier index of an event's medium. None means GPU. Raises InvalidEventError."""
    index = 0 if medium is None else MEDIUM_INDEX.get(medium) if isinstance(medium, str) else None
    if index is None:
        raise InvalidEventError("medium", f"got {medium!r}, expected one of {', '.join(MEDIUM_INDEX)}")
    return index


def check_extra_key(extra_key: Any) -> None:
    """Raise InvalidEventError unless the key is None or a string of at most `MAX_EXTRA_KEY_BYTES` bytes in UTF-8."""
    if extra_key is None:
        return
    if not isinstance(extra_key, str):
        raise InvalidEventError("type", f"extra_key: got {type(extra_key).__name__}, expected str")
    try:
        num_bytes = len(extra_key.encode())
    except UnicodeEncodeError as error:
        raise InvalidEventError("extra_key", str(error)) from None
    if num_bytes > MAX_EXTRA_KEY_BYTES:
        raise InvalidEventError("extra_key", f"{num_bytes} bytes, at most {MAX_EXTRA_KEY_BYTES}")


def stored_columns(events: Sequence[BlockStored], block_size: int) -> PageEvents:
    """Return the columns of events that carry their sequence hashes. Raises InvalidEventError if one is invalid."""
    try:
        lists = _hash_lists(events)
        lengths = _page_counts(events, lists, block_size)
        named = [event.sequence_hashes for event in events]
        joined = b"".join(named)
        if list(map(len, named)) != [8 * length for length in lengths]:
            raise InvalidEventError("hash_count", "sequence_hashes: 8 bytes for each of block_hashes expected")
        return _columns(events, lists, lengths, np.frombuffer(joined, "<u8"))
    except TypeError as error:
        raise InvalidEventError("type", str(error)) from None
    except OverflowError as error:
        raise InvalidEventError("hash_range", str(error)) from None


def derived_columns(event: BlockStored, block_size: int, parent: int | None) -> PageEvents:
    """Return the columns of an event without sequence hashes, which are computed from its tokens.

    parent: sequence hash of the parent of the first page, or None for the start of a prompt. Raises InvalidEventError;
    the reason is `unidentified` if the event has no tokens.
    """
    try:
        lists = _hash_lists([event])
        lengths = _page_counts([event], lists, block_size)
        if lengths[0] and not event.token_ids:
            raise InvalidEventError("unidentified", "neither sequence_hashes nor token_ids")
        tokens, is_bigram = raw_tokens(event)
        seed = namespace_seed(cache_salt=event.extra_key)
        hashes = sequence_hashes(tokens, block_size, seed, parent, is_bigram=is_bigram)
        return _columns([event], lists, lengths, hashes)
    except TypeError as error:
        raise InvalidEventError("type", str(error)) from None
    except OverflowError as error:
        raise InvalidEventError("hash_range", str(error)) from None


def removed_words(events: Sequence[BlockRemoved]) -> U64Array:
    """Return the block hashes of all events, concatenated. Raises InvalidEventError."""
    try:
        return _words(_joined(_hash_lists(events)))
    except TypeError as error:
        raise InvalidEventError("type", str(error)) from None
    except OverflowError as error:
        raise InvalidEventError("hash_range", str(error)) from None


def raw_tokens(event: BlockStored) -> tuple[U32Array, bool]:
    """Return the tokens of an event and whether they were given as pairs (n pairs are n + 1 tokens). Raises
    InvalidEventError.
    """
    tokens: list[Any] = event.token_ids
    try:
        if not tokens or not isinstance(tokens[0], tuple | list):
            return token_array(tokens), False
        firsts, seconds = zip(*tokens, strict=True)
        if firsts[1:] != seconds[:-1]:
            raise InvalidEventError("tokens", "pairs that do not overlap by one token")
        return token_array([*firsts, seconds[-1]]), True
    except (InvalidValueError, ValueError) as error:
        raise InvalidEventError("tokens", str(error)) from None


def token_rows(event: BlockStored, block_size: int) -> U32Array:
    """Return uint32[pages, block_size], the tokens of each page.

    The second dimension is block_size + 1 in bigram mode. The shape is [0, 0] if the event has no tokens. Raises
    InvalidEventError.
    """
    tokens, is_bigram = raw_tokens(event)
    if not len(tokens):
        return tokens.reshape(0, 0)
    return np.lib.stride_tricks.sliding_window_view(tokens, block_size + is_bigram)[::block_size]


def _page_counts(events: Sequence[BlockStored], lists: list[list[int]], block_size: int) -> list[int]:
    lengths = list(map(len, lists))
    sizes = {event.block_size for event in events}
    if sizes != {block_size}:
        raise InvalidEventError("block_size", f"got {sorted(sizes - {block_size})}, this stream has {block_size}")
    tokens = [event.token_ids for event in events]
    _check_lists(tokens)
    num_tokens = list(map(len, tokens))
    if num_tokens != [num_pages * block_size for num_pages in lengths]:
        for got, num_pages in zip(num_tokens, lengths, strict=True):
            if got and got != num_pages * block_size:
                raise InvalidEventError("token_count", f"token_ids: {got} entries, expected {num_pages} x {block_size}")
    return lengths


def _columns(events: Sequence[BlockStored], lists: list[list[int]], lengths: list[int], hashes: U64Array) -> PageEvents:
    parents = [event.parent_block_hash for event in events]
    return PageEvents(
        _words(_joined(lists)),
        hashes,
        np.array(lengths, np.int64),
        _words([parent or 0 for parent in parents]),
        np.frombuffer(bytes([parent is not None for parent in parents]), np.uint8),
    )


def _hash_lists(events: Sequence[BlockStored] | Sequence[BlockRemoved]) -> list[list[int]]:
    lists = [event.block_hashes for event in events]
    _check_lists(lists)
    longest = max(map(len, lists))
    if longest > MAX_PAGES_PER_EVENT:
        raise InvalidEventError("hash_count", f"block_hashes: {longest} pages, at most {MAX_PAGES_PER_EVENT}")
    return lists


def _check_lists(lists: Sequence[object]) -> None:
    wrong = set(map(type, lists)) - {list, tuple}
    if wrong:
        raise InvalidEventError("type", f"expected lists, got {', '.join(kind.__name__ for kind in wrong)}")


def _joined(lists: list[list[int]]) -> list[int]:
    return lists[0] if len(lists) == 1 else list(chain.from_iterable(lists))


def _words(values: list[int]) -> U64Array:
    """Return signed or unsigned 64-bit hashes modulo 2**64. Raises TypeError or OverflowError."""
    if not values:
        return np.empty(0, np.uint64)
    try:
        return np.frombuffer(array(_SIGNED, values), np.uint64)
    except OverflowError:  # unsigned hashes, as in vLLM, or signed and unsigned ones
        if min(values) < -(2**63):
            raise
        unsigned = [value & _MASK64 if value < 0 else value for value in values]
        return np.frombuffer(array(_UNSIGNED, unsigned), np.uint64)
