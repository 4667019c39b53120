"""The prompt that a question is about. This module loads no kernels of its own."""

from __future__ import annotations

from dataclasses import dataclass

from kv_events.hashing import U32Array, U64Array, num_whole_pages


@dataclass(frozen=True)
class AskedPrompt:
    """A prompt, as a query gives it. Exactly one of `tokens` and `hashes` is given."""

    model: str
    tenant: str
    tokens: U32Array | None = None
    """uint32[n]"""
    hashes: U64Array | None = None
    """uint64[pages] sequence hashes. They cannot be computed under another rule."""
    lora_name: str | None = None
    cache_salt: str | None = None
    is_bigram: bool = False
    """Whether pages consist of token pairs."""
    block_size: int | None = None
    """The only block size that the query accepts; None: any."""
    worker: str | None = None
    """The only worker to explain; None: all."""

    def num_pages(self, block_size: int) -> int:
        """Return the number of whole pages."""
        if self.tokens is None:
            return 0 if self.hashes is None else len(self.hashes)
        return num_whole_pages(len(self.tokens), block_size, is_bigram=self.is_bigram)

    def num_tail_tokens(self, block_size: int) -> int:
        """Return the number of tokens behind the last whole page."""
        if self.tokens is None:
            return 0
        return max(0, len(self.tokens) - self.is_bigram - self.num_pages(block_size) * block_size)
