"""Stored runs -> their pages with sequence hashes.

Blocks of groups may be larger than pages. A block hash then names the block's last page; the pages before it get hashes
derived from it.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash

from bridge.context import EngineContext
from bridge.decoding.events import PageRun
from bridge.hashes.hash_memory import HashMemory, HashNamespace, NamespaceSeed, TranslatedPages, single_pages
from kv_events.hashing import HEX_DIGEST, U64Array, local_hashes_with_objects, namespace_seed, object_hash

_seed_of = lru_cache(4096)(namespace_seed)

_MAX_GAPPED_PAGES = 8192
"""Pages of an event that leaves out blocks. Engines send one for each step of the scheduler."""
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


class PageNamer:
    """Names the pages of one worker's stores, and remembers their names in its `HashMemory`."""

    def __init__(self, context: EngineContext, hashes: HashMemory) -> None:
        self._defaults, self._counters, self._limited_logger, *_ = context
        self._hashes = hashes
        self.num_left_out = 0
        """Pages with unknown parents, since the engine was last empty."""

    def seed(self, lora_name: str | None, cache_salt: str | None) -> NamespaceSeed:
        """The seed of pages whose events name this adapter and salt, or those of the registration."""
        seed = _seed_of(lora_name or self._defaults.lora_name, cache_salt or self._defaults.cache_salt)
        return NamespaceSeed(seed, bool(cache_salt))

    def leave_out(self, num_pages: int) -> None:
        self._counters.unknown_parents += num_pages
        self.num_left_out += num_pages

    def look_up(self, run: PageRun, namespace: HashNamespace) -> TranslatedPages:
        """The pages of a run by their hashes alone. Those that are not remembered are left out and counted."""
        seed = self.seed(run.lora_name, run.cache_salt)
        pages = self._hashes.look_up(run.events.block_hashes, run.tier, seed, namespace)
        self._counters.unresolved_pages += len(run.events.block_hashes) - len(pages.columns.hashes)
        return pages

    def by_tokens(self, run: PageRun, namespace: HashNamespace) -> TranslatedPages:
        """The pages of a run by their parents and tokens. The run names every page."""
        seed = self.seed(run.lora_name, run.cache_salt)
        objects: list[list[int]] = []
        if run.extra_keys:
            entries, begins_prompt = run.extra_keys[: len(run.events.block_hashes)], not run.events.has_parent[0]
            objects, salt = read_extra_keys(entries, run.lora_name, run.cache_salt, begins_prompt=begins_prompt)
            if salt:
                self._counters.guessed_salts += 1
                seed = NamespaceSeed(self.seed(run.lora_name, salt).seed, is_stated=False)
        size = max(1, run.block_size)  # 0 if all events of the run are removals

        def hashed(start: int, num_pages: int, seed: int) -> U64Array:
            tokens = run.tokens[start * size : (start + num_pages) * size + run.is_bigram]
            return local_hashes_with_objects(tokens, objects, size, seed, is_bigram=run.is_bigram)

        local = hashed(0, run.num_positions // size, seed.seed)
        pages = self._hashes.translate(run.events, local, hashed, seed, namespace)
        if pages.num_unknown:
            self.leave_out(pages.num_unknown)
            self._limited_logger.warning("%d stored pages left out: parent_block_hash is not known", pages.num_unknown)
        return pages

    def of_group(self, run: PageRun, scale: int, namespace: HashNamespace) -> TranslatedPages:
        """The last page of each block of a group other than full attention. Some blocks may be left out.

        scale: pages in a block. Usually the hashes are known from stores of full attention.
        """
        seed = self.seed(run.lora_name, run.cache_salt)
        known = self._hashes.look_up(run.events.block_hashes, run.tier, seed, namespace)
        if len(known.columns.hashes) == len(run.events.block_hashes) or not run.num_positions:
            self._counters.unresolved_pages += len(run.events.block_hashes) - len(known.columns.hashes)
            return known
        if run.num_positions == len(run.events.block_hashes) * run.block_size:
            named = self.by_tokens(with_pages(run, scale), namespace).columns
            ends = slice(scale - 1, None, scale)
            return TranslatedPages(single_pages(named.block_hashes[ends], named.hashes[ends], run.tier))
        return self._with_gaps(run, scale, known, namespace)

    def _with_gaps(self, run: PageRun, scale: int, known: TranslatedPages, namespace: HashNamespace) -> TranslatedPages:
        """Name the blocks of an event that leaves some out. A block stands directly before the next one that is named,
        or at the end: engines leave out blocks at the beginnings of windows and chunks only.
        """
        hashes, num_pages = run.events.block_hashes, run.num_positions // run.block_size * scale
        is_too_long = num_pages > _MAX_GAPPED_PAGES
        if is_too_long or run.num_positions % run.block_size or any(run.extra_keys[1:]):  # whose, the keys do not say
            self._counters.unresolved_pages += len(hashes) - len(known.columns.hashes)
            return known
        pages = hashes[-1:] ^ (np.arange(1, num_pages + 1, dtype=np.uint64) * _SPREAD)  # names that nothing else has
        events = run.events._replace(block_hashes=pages, hashes=pages, lengths=np.array([num_pages], np.int64))
        named = self.by_tokens(run._replace(events=events, block_size=run.block_size // scale), namespace)
        name_at = named.columns.hashes[scale - 1 :: scale].tolist()
        place_of = {name: place for place, name in enumerate(name_at)}
        name_of = dict(zip(known.columns.block_hashes.tolist(), known.columns.hashes.tolist(), strict=True))
        found: dict[int, int] = {}
        after = len(name_at)
        for block_hash in reversed(hashes.tolist()):
            after = place_of.get(name_of.get(block_hash, 0), after - 1)
            if block_hash not in name_of and after >= 0:
                found[block_hash] = name_at[after]
        self._counters.unresolved_pages += len(hashes) - len(name_of) - len(found)
        new_hashes, new_names = (np.array(list(column), np.uint64) for column in (found, found.values()))
        new = self._hashes.remember(new_hashes, new_names, run.tier, named.seed, namespace)
        all_hashes, all_names = (np.concatenate(pair) for pair in zip(known.columns[:2], new.columns[:2], strict=True))
        return TranslatedPages(single_pages(all_hashes, all_names, run.tier))


def with_pages(run: PageRun, scale: int) -> PageRun:
    """The run with each block cut into `scale` pages. The last page of each has the block's own hash."""
    if scale == 1:
        return run
    hashes = (run.events.block_hashes[:, np.newaxis] ^ derived(scale)).ravel()
    events = run.events._replace(block_hashes=hashes, hashes=hashes, lengths=run.events.lengths * scale)
    extra_keys = [entry for entry in run.extra_keys for _ in range(scale)]
    return run._replace(events=events, block_size=run.block_size // scale, extra_keys=extra_keys)


@lru_cache(64)
def derived(scale: int) -> U64Array:
    """uint64[scale]: what the hashes of a block's pages are combined with by XOR; 0 for the last one."""
    masks = [xxhash.xxh3_64_intdigest(number.to_bytes(4, "little")) for number in range(1, scale)]
    return np.array([*masks, 0], np.uint64)


def read_extra_keys(
    entries: Sequence[Any], lora_name: str, cache_salt: str, *, begins_prompt: bool
) -> tuple[list[list[int]], str]:
    """Interpret the entries. An unknown key is hashed as an object, so that it still tells its page from others.

    lora_name, cache_salt: those that the event itself names, or empty. Returns for each page the hashes of its
    multimodal objects, ascending, and the cache salt of the prompt, if an entry looks like one, or "".
    """
    objects: list[list[int]] = []
    salt = ""
    for page, entry in enumerate(entries):
        keys = list(entry) if isinstance(entry, list | tuple) else [] if entry is None else [entry]
        for named in filter(None, (lora_name, cache_salt)):
            if named in keys:
                keys.remove(named)  # one occurrence only: both may have the same text
        if begins_prompt and page == 0 and not cache_salt and keys and _is_salt(keys[-1]):
            salt = keys.pop()
        objects.append(sorted(map(_object_hash, keys)))
    return objects, salt


def _is_salt(key: Any) -> bool:
    return isinstance(key, str) and HEX_DIGEST.fullmatch(key) is None


def _object_hash(key: Any) -> int:
    return object_hash(key[0] if isinstance(key, list | tuple) and key and isinstance(key[0], str) else key)
