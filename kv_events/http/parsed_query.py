"""A query in one form, whichever dialect it came in. This module needs numpy and the hashing; clients do without it."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kv_events import hashing
from kv_events.hashing import U64Array
from kv_events.http.queries import MediaSpan

Weights = tuple[float, ...]
PromptArray: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True)
class ParsedQuery:
    """A query without the numbers of its prompt: which workers hold how much of the prompt?"""

    model: str
    tenant: str
    field: str
    """Key of `_KINDS`: what the numbers are."""
    lora_name: str | None = None
    cache_salt: str | None = None
    is_bigram: bool = False
    """Whether pages consist of token pairs."""
    weights: Weights | None = None
    """[4], fastest tier first."""
    is_peer: bool = True
    """Whether the query uses Dynamo's dialect."""
    block_size: int | None = None
    """Tokens a page, given in the RFC's dialect."""
    instance: str | None = None
    """The only worker in the answer, or None for all."""
    is_detailed: bool = False
    """Whether ranks are described by objects, see `RfcQuery.hit_detail`."""
    media: tuple[MediaSpan, ...] = ()
    """What the tokens of the prompt stand for besides text."""

    @property
    def is_usual(self) -> bool:
        """Whether `api.fast.writer` can answer it."""
        return self.instance is None and not self.is_detailed and not self.media

    def hashes(self, numbers: PromptArray, block_size: int) -> U64Array:
        """Return uint64[pages]: the prompt's sequence hashes in a namespace with this block size."""
        if self.field == "token_ids" and self.media:
            objects = self._objects(
                hashing.num_whole_pages(len(numbers), block_size, is_bigram=self.is_bigram), block_size
            )
            seed = int(self.seed)
            return hashing.rolling_hashes(
                hashing.local_hashes_with_objects(numbers, objects, block_size, seed, is_bigram=self.is_bigram)
            )
        if self.field == "token_ids":
            return hashing.sequence_hashes(numbers, block_size, int(self.seed), is_bigram=self.is_bigram)
        return hashing.rolling_hashes(numbers) if self.field == "block_hashes" else numbers

    def num_positions(self, numbers: PromptArray) -> int | None:
        """Return the tokens or token pairs of the prompt. None if it is given by hashes."""
        return max(0, len(numbers) - self.is_bigram) if self.field == "token_ids" else None

    def _objects(self, num_pages: int, block_size: int) -> list[list[int]]:
        """Return for each page the hashes of the media that have tokens in it, ascending."""
        objects: list[list[int]] = [[] for _ in range(num_pages)]
        for span in self.media:
            for page in objects[span.offset // block_size : -(-(span.offset + span.length) // block_size)]:
                page.append(hashing.object_hash(span.hash))
        return [sorted(page) for page in objects]

    @cached_property
    def seed(self) -> np.uint64:
        """Seed of the local hashes."""
        return np.uint64(hashing.namespace_seed(self.lora_name, self.cache_salt))
