"""Finds out how a worker has hashed pages whose tokens are known."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import xxhash

from analysis.explain.prompts import HashRule, PromptHashes
from kv_events.codec import extra_keys
from kv_events.hashing import U32Array, U64Array, namespace_seed
from kv_events.records import LogRecord

_SEEDS_TRIED = 65_536
_MOST_SEARCHES = 64
_MOST_NAMES = 64
"""In one record."""


class RuleFinder:
    """Tries rules on the pages of one prompt. A rule is right if it gives the sequence hash that a worker sent.

    After 64 searches, further rules are not recognised: a log may contain any number of salts for one prompt.
    """

    def __init__(self, hashes: PromptHashes) -> None:
        self._hashes = hashes
        self._found: dict[tuple[HashRule, int, int], HashRule | None] = {}
        self._names = lru_cache(maxsize=1)(extra_keys)  # each event of a record may ask

    def find(
        self, record: LogRecord, asked: HashRule, hashes: U64Array, pages: npt.NDArray[np.int64]
    ) -> HashRule | None:
        """Return the rule, or None if it is none of those that can be tried.

        record: stores the pages. asked: the rule of the query. hashes: the sequence hashes that were stored for these
        pages of the prompt. The first 64 names in the record and the seeds below 65,536 are tried. A record without
        tokens contains no names.
        """
        first = int(np.argmin(pages))
        page, found = int(pages[first]), int(hashes[first])
        key = (asked, page, found)
        tokens = self._hashes.prompt.tokens
        if key in self._found or tokens is None:
            return self._found.get(key)
        names = self._names(record.payload)[:_MOST_NAMES]
        if len(self._found) == _MOST_SEARCHES or (page and not names):  # seeds are tried on a first page
            return None
        self._found[key] = self._search(tokens, names, asked, page, found)
        return self._found[key]

    def _search(self, tokens: U32Array, names: list[str], asked: HashRule, page: int, found: int) -> HashRule | None:
        first = tokens[: (page + 1) * asked.block_size + asked.is_bigram]
        for name in names:
            for rule in (asked._replace(lora_name=name), asked._replace(cache_salt=name)):
                if int(self._hashes.compute(first, rule)[-1]) == found:
                    return rule
        return _with_seed(first, asked, found) if page == 0 else None


def _with_seed(tokens: U32Array, asked: HashRule, found: int) -> HashRule | None:
    """Return the rule with the seed that gives a first page its hash. tokens: of the page."""
    data = tokens.astype("<u4", copy=False).tobytes()
    names = namespace_seed(asked.lora_name, asked.cache_salt, base=0)
    mask = 2**64 - 1
    for seed in range(_SEEDS_TRIED):
        if xxhash.xxh3_64_intdigest(data, seed=seed + names & mask) == found:
            return asked._replace(seed=seed)
    return None
