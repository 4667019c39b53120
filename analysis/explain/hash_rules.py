"""The hashes of a prompt under every rule by which a worker may have hashed it, and the search for further rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from analysis.explain.asked_prompt import AskedPrompt
from analysis.kernels.watched import BITMAP_WORDS, find_watched, watch
from kv_events.codec import extra_keys
from kv_events.hash_seed import SEEDS, process_seed
from kv_events.hashing import U32Array, U64Array, block_hash_chain, hash_strs_to_int64, namespace_seed, sequence_hashes
from kv_events.kernels.bundles import pin
from kv_events.kernels.page_table import make_table
from kv_events.records import LogRecord

_OTHER_SEEDS = (*SEEDS.values(), 0, 1, 42)
_MOST_BLOCK_SIZES = 16
_MOST_OTHER_PAGES = 4096
"""Pages of the prompt that are looked for under another rule than the one that was asked for."""
_SEEDS_TRIED = 65_536
_MOST_SEARCHES = 64
_MOST_NAMED = 32
"""Rules for names that records with tokens contain."""
_MOST_NAMES = 64
"""In one record."""
_CAPACITY = 2**24
"""Of a table of hashes. Only address space is reserved for it."""

I64Array = npt.NDArray[np.int64]


class HashRule(NamedTuple):
    """What enters the sequence hashes of a page besides its tokens."""

    block_size: int
    lora_name: str | None
    cache_salt: str | None
    seed: int
    is_bigram: bool

    def differences(self, asked: HashRule) -> dict[str, str | int | bool | None]:
        """Return the fields in which this rule differs from the one that was asked for, with the values of this one."""
        return {name: value for name, value in self._asdict().items() if value != getattr(asked, name)}


class Column(Enum):
    """Where the hashes of a variant are looked for in records."""

    SEQUENCE = "sequence hashes"
    BLOCK = "block hashes"


class Variant(NamedTuple):
    """The pages of the prompt under one rule."""

    number: int
    column: Column
    rule: HashRule
    """For block hashes, only `block_size` and `is_bigram` matter: they do not depend on adapter, salt and seed."""
    hashes: U64Array
    first_id: int


class WatchTable:
    """Finds the hashes that a question is about, few among millions. A bitmap rejects most others."""

    def __init__(self) -> None:
        self._table = pin(make_table(_CAPACITY))
        self._bitmap = np.zeros(BITMAP_WORDS, np.uint64)
        self._ids = self._positions = self._entries = np.empty(0, np.int64)

    def add(self, hashes: U64Array, first_id: int) -> None:
        """Watch hashes. Hash i has the id first_id + i; a hash that is watched already keeps its id."""
        is_new = np.empty(len(hashes), np.bool_)
        watch(self._table, self._bitmap, np.ascontiguousarray(hashes), is_new)
        self._ids = np.concatenate((self._ids, first_id + np.flatnonzero(is_new)))

    def find(self, hashes: U64Array) -> tuple[I64Array, I64Array]:
        """Return (int64[k] ascending positions of watched hashes, int64[k] their ids). Valid until the next call."""
        if len(hashes) > len(self._positions):
            self._positions, self._entries = np.empty(len(hashes), np.int64), np.empty(len(hashes), np.int64)
        count = find_watched(self._table, self._bitmap, hashes, self._positions, self._entries)
        return self._positions[:count], self._ids[self._entries[:count]]


class PromptHashes:
    """The prompt's pages under all rules, each page with an id in one of two watch tables.

    Rules are added for each block size that the log shows.
    """

    def __init__(self, prompt: AskedPrompt) -> None:
        self.prompt = prompt
        self.variants: list[Variant] = []
        self.sequence_table, self.block_table = WatchTable(), WatchTable()
        self._variant_of_id = np.empty(0, np.int64)
        self._by_rule: dict[tuple[Column, HashRule], Variant] = {}
        self._block_sizes: set[int] = set()
        self._num_named = 0

    def asked_rule(self, block_size: int) -> HashRule:
        """Return the rule under which a query looks for the prompt in streams with this block size."""
        names = (self.prompt.query.lora_name or None, self.prompt.query.cache_salt or None)
        return HashRule(block_size, *names, process_seed(), self.prompt.query.is_bigram)

    def asked(self, block_size: int) -> Variant:
        """Return the prompt's pages as a query looks for them in streams with this block size."""
        self.add_block_size(block_size)
        return self._by_rule[Column.SEQUENCE, self.asked_rule(block_size if self.prompt.hashes is None else 0)]

    def find(self, column: Column, hashes: U64Array) -> Iterator[tuple[Variant, I64Array, I64Array]]:
        """Yield each variant that has pages in a column of a record: (variant, positions in the column, pages)."""
        table = self.sequence_table if column is Column.SEQUENCE else self.block_table
        positions, ids = table.find(hashes)
        if not len(ids):
            return
        numbers = self._variant_of_id[ids]
        for number in np.unique(numbers).tolist():
            variant = self.variants[number]
            chosen = numbers == number
            yield variant, positions[chosen], ids[chosen] - variant.first_id

    def add_block_size(self, block_size: int) -> None:
        """Look for the prompt with this block size, too."""
        if block_size in self._block_sizes:
            return
        self._block_sizes.add(block_size)
        tokens = self.prompt.tokens
        if tokens is None:
            if not self.variants and self.prompt.hashes is not None:
                self._add(Column.SEQUENCE, self.asked_rule(0), self.prompt.hashes)
            return
        asked = self.asked_rule(block_size)
        self._add(Column.SEQUENCE, asked, self.prompt.query.hashes(tokens, block_size))
        if len(self._block_sizes) > _MOST_BLOCK_SIZES:
            return
        first = tokens[: _MOST_OTHER_PAGES * block_size + 1]
        for rule in _other_rules(asked):
            if (Column.SEQUENCE, rule) not in self._by_rule:
                self._add(Column.SEQUENCE, rule, self.compute(first, rule))
        for is_bigram in (False, True):
            rule = asked._replace(is_bigram=is_bigram)
            chain = block_hash_chain(first, block_size, None, is_bigram=is_bigram)
            self._add(Column.BLOCK, rule, hash_strs_to_int64(chain).view(np.uint64))

    def add_names(self, names: Iterable[str], block_size: int) -> None:
        """Look for the prompt under these adapters and salts, too, by at most 32 rules."""
        tokens, asked = self.prompt.tokens, self.asked_rule(block_size)
        for name in names:
            for rule in (asked._replace(lora_name=name), asked._replace(cache_salt=name)):
                if (
                    tokens is not None
                    and (Column.SEQUENCE, rule) not in self._by_rule
                    and self._num_named < _MOST_NAMED
                ):
                    self._num_named += 1
                    self._add(Column.SEQUENCE, rule, self.compute(tokens[: _MOST_OTHER_PAGES * block_size + 1], rule))

    def first_pages(self) -> list[bytes]:
        """Return the tokens of the prompt's first page as records contain them, for each block size.

        Of shorter pages than eight tokens, there are as many as have eight: single tokens are in nearly every record.
        """
        tokens = self.prompt.tokens
        if tokens is None:
            return []
        return [tokens[: max(size, 8)].astype("<u4").tobytes() for size in self._block_sizes if len(tokens) >= size]

    def is_known(self, hashes: U64Array) -> bool:
        """Return whether any of these sequence hashes is looked for."""
        return len(self.sequence_table.find(hashes)[0]) > 0

    def compute(self, tokens: U32Array, rule: HashRule) -> U64Array:
        """Return uint64[pages], the sequence hashes of tokens under a rule."""
        seed = namespace_seed(rule.lora_name, rule.cache_salt, base=rule.seed)
        return sequence_hashes(tokens, rule.block_size, seed, base=rule.seed, is_bigram=rule.is_bigram)

    def _add(self, column: Column, rule: HashRule, hashes: U64Array) -> None:
        variant = Variant(len(self.variants), column, rule, hashes, len(self._variant_of_id))
        self.variants.append(variant)
        self._by_rule[column, rule] = variant
        self._variant_of_id = np.concatenate((self._variant_of_id, np.full(len(hashes), variant.number, np.int64)))
        (self.sequence_table if column is Column.SEQUENCE else self.block_table).add(hashes, variant.first_id)


def _other_rules(asked: HashRule) -> Iterator[HashRule]:
    """Yield the rules that differ from the one asked for in a way that a deployment gets wrong."""
    lora, salt = asked.lora_name, asked.cache_salt
    for names in dict.fromkeys(((None, salt), (lora, None), (None, None), (salt, lora), (lora, lora), (salt, salt))):
        yield asked._replace(lora_name=names[0], cache_salt=names[1])
    for seed in _OTHER_SEEDS:
        yield asked._replace(seed=seed)
    yield asked._replace(is_bigram=not asked.is_bigram)


class RuleFinder:
    """Tries rules on the pages of one prompt. A rule is right if it gives the sequence hash that a worker sent.

    After 64 searches, further rules are not recognised: a log may contain any number of salts for one prompt.
    """

    def __init__(self, hashes: PromptHashes) -> None:
        self._hashes = hashes
        self._found: dict[tuple[HashRule, int, int], HashRule | None] = {}
        self._names = lru_cache(maxsize=1)(extra_keys)  # each event of a record may ask

    def find(self, record: LogRecord, asked: HashRule, hashes: U64Array, pages: I64Array) -> HashRule | None:
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
