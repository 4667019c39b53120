"""The prompt that a question is about. This module loads no kernels of its own."""

from __future__ import annotations

from dataclasses import dataclass

from kv_events.hashing import U32Array, U64Array, num_whole_pages
from kv_events.http.parsed_query import ParsedQuery, PromptArray


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
        if self.query.field != "token_ids":
            return 0
        return max(0, len(self.numbers) - self.query.is_bigram - self.num_pages(block_size) * block_size)
