"""The prompt to explain, as a service sends it to its explaining process. This module loads no kernels of its own."""

from dataclasses import dataclass

import msgspec
import numpy as np

from kv_events.hashing import U32Array, U64Array, num_whole_pages
from kv_events.http.parsed_query import ParsedQuery, PromptArray
from kv_events.log.moments import LogMoment


@dataclass(frozen=True)
class AskedPrompt:
    """A query, and the worker to explain."""

    query: ParsedQuery
    numbers: PromptArray
    """Those of the prompt, see `ParsedQuery.field`."""
    named: str | None = None
    """The worker that is named beside the query."""

    @property
    def worker(self) -> str | None:
        """The only worker to explain; None: all."""
        return self.query.instance if self.named is None else self.named

    @property
    def tokens(self) -> U32Array | None:
        """uint32[n], or None if the prompt is given by hashes."""
        return self.numbers if self.query.field == "token_ids" else None

    @property
    def hashes(self) -> U64Array | None:
        """uint64[pages] sequence hashes, or None. They cannot be computed under another rule."""
        return None if self.query.field == "token_ids" else self.query.hashes(self.numbers, 0)

    def num_pages(self, block_size: int) -> int:
        """Return the number of whole pages."""
        if self.query.field != "token_ids":
            return len(self.numbers)
        return num_whole_pages(len(self.numbers), block_size, is_bigram=self.query.is_bigram)

    def num_tail_tokens(self, block_size: int) -> int:
        """Return the number of tokens behind the last whole page."""
        positions = self.query.num_positions(self.numbers)
        return 0 if positions is None else positions - self.num_pages(block_size) * block_size


class ExplainJob(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to explain."""

    folder: str
    """Of the event log."""
    query: ParsedQuery
    numbers: bytes
    """Of the prompt, little-endian: u32 tokens or u64 hashes."""
    named: str | None
    """See `AskedPrompt`."""
    moment: LogMoment

    @property
    def prompt(self) -> AskedPrompt:
        """The prompt to explain."""
        kind = "<u4" if self.query.field == "token_ids" else "<u8"
        return AskedPrompt(self.query, np.frombuffer(self.numbers, kind), self.named)


class ExplainError(msgspec.Struct, frozen=True, kw_only=True):
    """Why there is no explanation."""

    field: str | None = None
    """The field of the request that does not fit the log. None: the log cannot be read."""
    detail: str = ""
    """Empty: this is an explanation, which has no such field."""
