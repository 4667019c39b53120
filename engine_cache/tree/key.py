"""RadixKey: the key of lookups in a radix tree and of its nodes.

A key is a sequence of *logical units*: tokens, or pairs of neighbouring tokens in bigram mode. n raw tokens make n
units, or n - 1 pairs. Tokens are stored in one `bytes` object, so keys are immutable, a walk compares and slices
memory, and a slice does not keep a long prompt alive.

    raw tokens      t0   t1   t2   t3   t4
    plain units     0    1    2    3    4
    bigram units      0    1    2    3          slice [1:3) keeps raw tokens t1 t2 t3
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import index
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from engine_cache.types import IndexArray
from kv_events.errors import InvalidValueError
from kv_events.hashing import U32Array, block_hash_chain
from kv_events.limits import MAX_EXTRA_KEY_BYTES
from kv_events.schema import TokenIds
from kv_events.tokens import token_array

PageKey: TypeAlias = bytes | tuple[str, bytes]
Unit: TypeAlias = int | tuple[int, int]
ChildKey: TypeAlias = Unit | tuple[Unit, ...] | tuple[str, Unit | tuple[Unit, ...]]

_TOKEN_BYTES = 4


class RadixKey:
    """An immutable sequence of logical units in one namespace.

    token_ids: raw tokens, any sequence of integers in 0 .. 2**32 - 1; copied. extra_key: namespace (LoRA name, cache
    salt, tenant), None or "" for the common one, else UTF-8 text of at most `MAX_EXTRA_KEY_BYTES`. Raises
    InvalidValueError naming the first position that does not fit, or `extra_key`.
    """

    __slots__ = ("data", "extra_key", "is_bigram")

    data: bytes
    """Raw tokens as little-endian u32, which is also the hashed form."""
    extra_key: str | None
    is_bigram: bool

    def __init__(
        self, token_ids: Sequence[int] | npt.NDArray[np.integer], extra_key: str | None = None, is_bigram: bool = False
    ) -> None:
        self.data = token_array(token_ids).astype("<u4", copy=False).tobytes()
        self.extra_key = _namespace(extra_key)
        self.is_bigram = is_bigram

    def _with_data(self, data: bytes) -> RadixKey:
        key = object.__new__(RadixKey)
        key.data = data
        key.extra_key = self.extra_key
        key.is_bigram = self.is_bigram
        return key

    @property
    def raw(self) -> U32Array:
        """Return a read-only view of the raw tokens, [n]."""
        return np.frombuffer(self.data, dtype="<u4")

    @property
    def token_ids(self) -> array[int]:
        """Return the raw tokens as a new `array('q')`."""
        return array("q", self.raw.astype(np.int64).tobytes())

    def __len__(self) -> int:
        num_tokens = len(self.data) // _TOKEN_BYTES
        return num_tokens - self.is_bigram if num_tokens else 0

    def __iter__(self) -> Iterator[Unit]:
        tokens = self.raw.tolist()
        return iter(pairwise(tokens)) if self.is_bigram else iter(tokens)

    def __getitem__(self, item: int | slice) -> RadixKey:
        if isinstance(item, slice):
            if item.step not in (None, 1):
                raise InvalidValueError("slice step", item.step, "1")
            start, stop, _ = item.indices(len(self))
        else:
            start = index(item)
            start = start + len(self) if start < 0 else start
            if not 0 <= start < len(self):
                raise IndexError(f"unit {item} of a key of length {len(self)}")
            stop = start + 1
        if stop <= start:
            return self._with_data(b"")
        return self._with_data(self._raw_bytes(start, stop))

    def _raw_bytes(self, start: int, stop: int) -> bytes:
        return self.data[_TOKEN_BYTES * start : _TOKEN_BYTES * (stop + self.is_bigram)]

    def __repr__(self) -> str:
        return f"RadixKey({len(self)} units, extra_key={self.extra_key!r}, is_bigram={self.is_bigram})"

    def page_aligned(self, page_size: int) -> RadixKey:
        """Return the longest prefix of whole pages."""
        aligned = len(self) // page_size * page_size
        return self if aligned == len(self) else self[:aligned]

    def maybe_to_bigram_view(
        self, is_eagle: bool, value: IndexArray | None = None
    ) -> tuple[RadixKey, IndexArray | None]:
        """With `is_eagle`, return the key's bigram view, which copies no tokens, and `value` cut to its length.

        Otherwise return both unchanged. The conversion is idempotent.
        """
        if not is_eagle:
            return self, value
        key = self
        if not self.is_bigram:
            key = self._with_data(self.data)
            key.is_bigram = True
        return key, None if value is None else value[: len(key)]

    def match(self, other: RadixKey, page_size: int, start: int = 0) -> int:
        """Return the number of leading units that `self[start:]` and `other` share, rounded down to whole pages.

        Raises InvalidValueError for keys of different namespaces or different kinds of units.
        """
        if self.extra_key != other.extra_key:
            raise InvalidValueError("extra_key", other.extra_key, repr(self.extra_key))
        if self.is_bigram != other.is_bigram:
            raise InvalidValueError("is_bigram", other.is_bigram, repr(self.is_bigram))
        if self.data.startswith(other.data, _TOKEN_BYTES * start):
            units = len(other)
        else:
            units = max(0, _common_prefix(self.raw[start:], other.raw) - self.is_bigram)
        return units // page_size * page_size

    def child_key(self, page_size: int) -> ChildKey:
        """Return the readable key of the first page among the children of a node.

        The result is the unit, or a tuple of `page_size` units. With a namespace it is the pair of namespace and units.
        The key must contain a whole page.
        """
        units = tuple(self[:page_size])
        plain = units[0] if page_size == 1 else units
        return plain if self.extra_key is None else (self.extra_key, plain)

    def page_key(self, page_size: int, start: int = 0) -> PageKey:
        """Return the bytes of the first page of `self[start:]`. Trees use them as dictionary keys.

        Two results are equal exactly when the results of `child_key` are equal, but bytes are far cheaper to build and
        to hash.
        """
        page = self._raw_bytes(start, start + page_size)
        return page if self.extra_key is None else (self.extra_key, page)

    def pages(self, page_size: int) -> Sequence[TokenIds]:
        """Return the units of each page, in the form of events. The key must be page-aligned."""
        if not self.is_bigram:
            rows: list[list[int]] = self.raw.reshape(-1, page_size).tolist()
            return rows
        pairs = list(pairwise(self.raw.tolist()))
        return [pairs[i : i + page_size] for i in range(0, len(pairs), page_size)]

    def hash_page(self, start: int, end: int, prior_hash: str | None = None) -> str:
        """Return the SHA-256 hash of the page of units [start, end), chained to the page before it, as hex."""
        if not 0 <= start < end <= len(self):
            raise InvalidValueError("page", (start, end), f"0 <= start < end <= {len(self)}")
        page = self[start:end]
        return block_hash_chain(page.raw, end - start, prior_hash, is_bigram=self.is_bigram)[0]


def _common_prefix(a: U32Array, b: U32Array) -> int:
    n = min(len(a), len(b))
    if n == 0:
        return 0
    differs = a[:n] != b[:n]
    first = int(differs.argmax())
    return first if differs[first] else n


def _namespace(extra_key: str | None) -> str | None:
    """Check and return a namespace. None is the default one. Others must be valid in hashes, keys and events."""
    if extra_key is None:
        return None
    if not isinstance(extra_key, str):
        raise InvalidValueError("extra_key", extra_key, "a text or None")
    try:
        num_bytes = len(extra_key.encode())
    except UnicodeEncodeError:
        raise InvalidValueError("extra_key", extra_key, "text that UTF-8 can encode") from None
    if num_bytes > MAX_EXTRA_KEY_BYTES:
        raise InvalidValueError("extra_key", f"{num_bytes} bytes", f"at most {MAX_EXTRA_KEY_BYTES}")
    return extra_key
