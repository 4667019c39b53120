"""The kernel of a query: from the text of a prompt, or its tokens or hashes, to the text of the answer."""

from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from api.fast.kernels.answer import Layout, StreamTable, put_answer
from api.queries.kernels.numbers import read_hashes, read_tokens
from indexer.kernels.find import PageLookup, find
from indexer.kernels.reuse import UNKNOWN, shorten
from kv_events.kernels.bundles import (
    BytesInput,
    F64Vector,
    I32Vector,
    U8Input,
    U8Vector,
    U32Input,
    U32Matrix,
    U32Vector,
    U64Input,
    U64Vector,
)
from kv_events.kernels.declare import inline_helper, kernel
from kv_events.kernels.instructions import copy_sixteen
from kv_events.kernels.numbers import U64, int64, uint64
from kv_events.kernels.xxh3 import LONG_STATE_WORDS, hash_windows, roll
from kv_events.limits import MAX_HASHES_PER_QUERY
from kv_events.schema import NUM_MEDIA

TOKENS, LOCAL_HASHES, SEQUENCE_HASHES = range(3)
"""What the numbers of a prompt are."""
IN_JSON, PACKED, IN_ARRAY = range(3)
"""Where they are: in a JSON text, in bytes (little-endian u32 or u64), or in an array."""

MAX_TOKENS_OF_TEXT = 2**17
"""More tokens in JSON or in bytes must be read in another way."""

_NO_PARENT = uint64(0)


Given: TypeAlias = tuple[int, int]
"""What the numbers of a prompt are, and where, see `TOKENS` and `IN_JSON`."""
JSON_TOKENS: Given = (TOKENS, IN_JSON)
Question: TypeAlias = tuple[Given, int, int, int, int, int]
"""See `answer_query`, as for the next two."""
Seeds: TypeAlias = tuple[U64, U64]
Times: TypeAlias = tuple[float, float, float, float]


class QueryBuffers(NamedTuple):
    """The memory in which one thread answers queries."""

    read: U32Vector
    """The tokens of a text or of bytes."""
    tokens: U32Input
    """The same memory."""
    rolled: U64Vector
    """The sequence hashes of tokens or of local hashes, and the hashes of a text or of bytes."""
    hashes: U64Input
    """The same memory."""
    long_state: U64Vector
    """`xxh3.long_hash_state` of the query."""
    streams: I32Vector
    """[streams] found streams."""
    pages: U32Matrix
    """[streams, 4] pages of each found stream."""
    weights: F64Vector
    """[4]"""
    out: U8Vector
    """The answer."""

    @classmethod
    def new(cls) -> Self:
        """Return the memory for namespaces without streams."""
        return cls(
            *_written_and_read(MAX_TOKENS_OF_TEXT, np.uint32),
            *_written_and_read(0, np.uint64),
            np.zeros(LONG_STATE_WORDS, np.uint64),
            np.empty(0, np.int32),
            np.empty((0, NUM_MEDIA), np.uint32),
            np.zeros(NUM_MEDIA),
            np.empty(0, np.uint8),
        )

    def with_room(self, num_pages: int, num_streams: int, num_bytes: int) -> Self:
        """Return this memory, larger where it is too small. num_bytes: of an answer."""
        buffers = self
        if len(self.rolled) < num_pages:
            rolled, hashes = _written_and_read(num_pages, np.uint64)
            buffers = buffers._replace(rolled=rolled, hashes=hashes)
        if len(self.streams) < num_streams:
            buffers = buffers._replace(
                streams=np.empty(num_streams, np.int32),
                pages=np.empty((num_streams, NUM_MEDIA), np.uint32),
            )
        if len(self.out) < num_bytes:
            buffers = buffers._replace(out=np.empty(2 * num_bytes, np.uint8))
        return buffers


def _written_and_read(size: int, dtype: type[np.generic]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return new memory, and a view for reading only."""
    written = np.empty(size, dtype)
    read = written.view()
    read.flags.writeable = False
    return written, read


@inline_helper
def _copy(data: U8Input, start: int, stop: int, out: U8Vector) -> None:
    at = int64(0)
    while at + 16 <= stop - start:
        copy_sixteen(out, at, data, start + at)
        at += 16
    for i in range(at, stop - start):
        out[i] = data[start + i]


@inline_helper
def _read(text: U8Input, start: int, stop: int, given: Given, buffers: QueryBuffers) -> int:
    """Read the numbers in `text[start:stop]`. Returns how many there are, -1 if they must be read in another way."""
    unit, form = given
    if form == PACKED:
        out, most = buffers.read.view(np.uint8), 4 * buffers.read.shape[0]
        if unit != TOKENS:
            out, most = buffers.rolled.view(np.uint8), int64(8 * MAX_HASHES_PER_QUERY)
        size, num_bytes = 4 if unit == TOKENS else 8, stop - start
        if num_bytes % size > 0 or num_bytes > most:
            return int64(-1)
        _copy(text, start, stop, out)
        return num_bytes // size
    if unit == TOKENS:
        count, end = read_tokens(text, start, buffers.read)
    else:
        count, end = read_hashes(text, start, buffers.rolled[:MAX_HASHES_PER_QUERY], unit == LOCAL_HASHES)
    return count if end == stop else int64(-1)


@kernel
def answer_query(
    text: BytesInput,
    start: int,
    stop: int,
    tokens: U32Input,
    hashes: U64Input,
    question: Question,
    seeds: Seeds,
    lookup: PageLookup,
    buffers: QueryBuffers,
    table: StreamTable,
    layout: Layout,
    times: Times,
) -> tuple[int, int]:
    """Answer a query about one namespace.

    text: has the numbers at `text[start:stop]`, unless they are in an array. A "]" follows those of JSON. tokens:
    uint32[n], hashes: uint64[n], for an array. question: how the prompt is given, block size, 1 for pages of token
    pairs or 0, 1 if `buffers.weights` counts or 0, 1 to find only or 0, bytes at the beginning of `buffers.out` that
    the caller has written. seeds: of local hashes, of sequence hashes. times: see `put_answer`.

    Returns (bytes of the answer, number of the prompt's tokens or token pairs, or of its hashes). The bytes are -1 if a
    weighted number needs another form. Both are -1 if the numbers must be read in another way. To find only: the number
    of streams that can reuse anything, in place of the bytes.
    """
    given, block_size, is_bigram, has_weights, finds_only, begin = question
    unit, form = given
    if form != IN_ARRAY:
        count = _read(text, start, stop, given, buffers)
        if count < 0:
            return int64(-1), int64(-1)
        tokens, hashes = buffers.tokens[:count], buffers.hashes[:count]
    num_positions, num_units = len(hashes), int64(UNKNOWN)
    if unit == TOKENS:
        num_positions = num_units = max(int64(0), len(tokens) - is_bigram)
        rolled = buffers.rolled[: num_positions // block_size]
        hash_windows(tokens, block_size + is_bigram, block_size, seeds[0], buffers.long_state, rolled)
        roll(rolled, seeds[1], _NO_PARENT, False, rolled)
        hashes = buffers.hashes[: len(rolled)]
    elif unit == LOCAL_HASHES:
        roll(hashes, seeds[1], _NO_PARENT, False, buffers.rolled)
        hashes = buffers.hashes[: len(hashes)]
    streams, pages = buffers.streams, buffers.pages
    found = int64(find(lookup, hashes, streams, pages))
    if table.groups.rules.shape[0] > 0:
        prompt, bounds = (block_size, num_units), (times[1], times[2], times[3])
        found = shorten(table.groups, hashes, prompt, bounds, streams, found, pages)
    if finds_only:
        return found, int64(num_positions)
    weights = buffers.weights[: has_weights * NUM_MEDIA]
    length = put_answer(buffers.out, begin, table, layout, times, streams[:found], pages, block_size, weights)
    return int64(length), int64(num_positions)
