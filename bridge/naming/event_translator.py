"""Decoded events -> pages with sequence hashes, handed to the publisher of one worker stream.

Pages are hashed here, where their tokens are. A page that cannot be hashed, or that stands for less than its whole
prefix, is left out and counted: a missing page costs a router less than one that does not exist.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from bridge.counters import BridgeCounters
from bridge.decoding.mooncake_events import MooncakeEvent
from bridge.decoding.runs import BadEvent, ClearedRun, Location, MixedRun, RemovedRun, Run, StoredRun, hashes_of
from bridge.naming.extra_keys import local_hashes_with_objects, read_extra_keys
from bridge.naming.hash_translator import HashNamespace, HashTranslator, NamespaceSeed, TranslatedPages
from bridge.naming.identity import StreamIdentity
from bridge.naming.media import is_device
from bridge.naming.namespaces import HashNamespaces
from bridge.naming.page_size import PageSize
from bridge.naming.tier_mapper import TierMapper
from kv_events.errors import shorten
from kv_events.hashing import U64Array, local_hashes, namespace_seed
from kv_events.limits import MAX_BLOCK_SIZE
from kv_events.rate_limited_logger import RateLimitedLogger
from publisher.blocks import BlockTable
from publisher.publisher import EventPublisher

_seed_of = lru_cache(4096)(namespace_seed)


class EventTranslator:
    """Translates the events of one worker stream. Publishes as soon as the block size is known. Not thread-safe."""

    def __init__(
        self,
        identity: StreamIdentity,
        counters: BridgeCounters,
        limited_logger: RateLimitedLogger,
        make_publisher: Callable[[int, BlockTable], EventPublisher],
        *,
        block_size: int | None,
        ledger_pages: int,
        name_pages: int,
    ) -> None:
        """block_size: None to learn it from stores. make_publisher: called with the block size and the publisher's
        table of blocks, and again for each later publisher. ledger_pages: most pages that a publisher holds.
        name_pages: most pages remembered beyond those held.
        """
        self._identity = identity
        self._counters = counters
        self._limited_logger = limited_logger
        self._make_publisher = make_publisher
        self._hashes = HashTranslator(ledger_pages, name_pages)
        self._namespaces = HashNamespaces()
        self._tier_mapper = TierMapper(counters, limited_logger)
        self._size = PageSize(block_size)
        if block_size is not None:
            self.open_publisher(block_size)

    @property
    def publisher(self) -> EventPublisher | None:
        """None until the block size is known."""
        return self._tier_mapper.publisher

    def open_publisher(self, block_size: int) -> EventPublisher:
        """Publish with a new publisher from now on."""
        self._tier_mapper.publisher = publisher = self._make_publisher(block_size, self._hashes.blocks)
        return publisher

    @property
    def block_size(self) -> int | None:
        """Tokens a page. None until it is known."""
        return self._size.tokens

    @property
    def block_size_mismatch(self) -> str:
        """Names both sizes while stores arrive and none has the registered size; else empty."""
        return self._size.mismatch

    @property
    def num_remembered(self) -> int:
        """Pages whose hashes are remembered."""
        return len(self._hashes)

    def apply(self, run: Run) -> None:
        """Apply one run of events."""
        match run:
            case StoredRun():
                self._store_in_group(run)
            case RemovedRun():
                self._remove_in_group(run)
            case MixedRun():
                self._change_in_group(run)
            case ClearedRun():
                self._counters.clears += 1
                self.clear()
            case MooncakeEvent():
                self._apply_mooncake_event(run)
            case BadEvent():
                self._counters.bad_events[run.reason] += 1
                if run.may_remove:
                    self.clear()

    def replace_publisher(self, block_size: int) -> None:
        """Begin a new epoch without pages, because the engine may have restarted.

        Hashes stay remembered: it may be the same engine, and hashes of another one mean the same content or nothing.
        """
        self.open_publisher(block_size)
        self.clear()
        self._size.forget_proof()

    def clear(self) -> None:
        """Publish that the worker holds no pages. Hashes stay remembered, because they keep their meaning."""
        self._tier_mapper.clear()

    # --- stores -----------------------------------------------------------------------------------------------------

    def _store_in_group(self, run: StoredRun) -> None:
        namespace = self._namespaces.get_or_add(run.attention_group)
        if namespace is None:
            self._refuse_namespace(run.attention_group, len(run.events.block_hashes))
        elif self._namespaces.accepts_stores(run.attention_group, run.spec_kind):
            self._store(run, namespace)
        else:
            self._counters.other_groups += len(run.events.block_hashes)

    def _store(self, run: StoredRun, namespace: HashNamespace) -> None:
        seed = self._seed_of_run(run)
        if run.num_positions == 0:
            pages = self._hashes.look_up(run.events.block_hashes, seed, namespace)
            self._counters.unresolved_pages += len(run.events.block_hashes) - len(pages.columns.hashes)
        else:
            whole = self._whole_pages(run)
            if whole is None:
                return
            pages = self._translated(whole, seed, namespace)
        self._tier_mapper.store(pages, namespace, run.location)

    def _seed_of_run(self, run: StoredRun) -> NamespaceSeed:
        return NamespaceSeed(self._seed(run.lora_name, run.cache_salt), bool(run.cache_salt))

    def _seed(self, lora_name: str | None, cache_salt: str | None) -> int:
        return _seed_of(lora_name or self._identity.lora_name, cache_salt or self._identity.cache_salt)

    def _translated(self, run: StoredRun, seed: NamespaceSeed, namespace: HashNamespace) -> TranslatedPages:
        """Hash the run's pages by their tokens."""
        objects: list[list[int]] = []
        if run.extra_keys:
            begins_prompt = not run.events.has_parent[0]
            extra = read_extra_keys(run.extra_keys, run.lora_name, run.cache_salt, begins_prompt=begins_prompt)
            objects = extra.objects
            if extra.salt:
                self._counters.guessed_salts += 1
                seed = NamespaceSeed(self._seed(run.lora_name, extra.salt), is_stated=False)
        size = max(1, run.block_size)  # 0 if all events of the run are removals

        def hashed(start: int, num_pages: int, seed: int) -> U64Array:
            tokens = run.tokens[start * size : (start + num_pages) * size + run.is_bigram]
            if any(objects):
                return local_hashes_with_objects(tokens, objects, size, seed, is_bigram=run.is_bigram)
            return local_hashes(tokens, size, seed, is_bigram=run.is_bigram)

        local = hashed(0, run.num_positions // size, seed.seed)
        pages = self._hashes.translate(run.events, local, hashed, seed, namespace)
        if pages.num_unknown:
            self._counters.unknown_parents += pages.num_unknown
            self._limited_logger.warning("%d stored pages left out: parent_block_hash is not known", pages.num_unknown)
        return pages

    def _whole_pages(self, run: StoredRun) -> StoredRun | None:
        """The full pages of the run. None if there are none, or if they have another size than the stream's."""
        num_pages = len(run.events.block_hashes)
        if not self._has_our_size(run):
            self._refuse_size(run.block_size, num_pages)
            return None
        num_full = run.num_positions // run.block_size
        if run.num_positions == num_pages * run.block_size:
            return run
        if num_full + 1 != num_pages:
            self._counters.bad_events["token_count"] += 1
            return None
        self._counters.partial_pages += 1
        if num_full == 0:
            return None
        events = run.events._replace(
            block_hashes=run.events.block_hashes[:num_full], lengths=np.array([num_full], np.int64)
        )
        return run._replace(events=events, num_positions=num_full * run.block_size)

    def _has_our_size(self, run: StoredRun) -> bool:
        size, is_on_device = run.block_size, is_device(*run.location)
        if 1 <= size <= min(MAX_BLOCK_SIZE, run.num_positions) and self._size.is_changed_by(
            size, len(run.events.lengths), is_on_device=is_on_device
        ):
            self._begin_with_size(size)
        return self._size.admits(size, is_on_device=is_on_device)

    def _begin_with_size(self, block_size: int) -> None:
        publisher = self._make_publisher(block_size, self._hashes.blocks)
        self.clear()
        self._hashes.clear()
        self._tier_mapper.publisher = publisher
        self._size.learn(block_size)

    def _refuse_size(self, block_size: int, num_pages: int) -> None:
        self._counters.other_block_sizes += num_pages
        self._limited_logger.warning(
            "pages of block_size %d left out, the stream's is %s", block_size, self._size.tokens
        )

    def _refuse_namespace(self, key: str | int | None, num_pages: int) -> None:
        self._counters.refused_spaces += num_pages
        self._limited_logger.warning("pages of %s left out: too many attention groups and owners", shorten(key))

    # --- removals ---------------------------------------------------------------------------------------------------

    def _remove_in_group(self, run: RemovedRun) -> None:
        for group in self._namespaces.groups_of_removal(run.attention_group):
            accepts_removals, namespace = self._namespaces.accepts_removals(group), self._namespaces.get(group)
            if accepts_removals and namespace is not None:
                self._tier_mapper.remove(run.block_hashes, namespace, run.location)
            elif accepts_removals is not None:
                self._counters.other_groups += len(run.block_hashes)

    # --- stores and removals ----------------------------------------------------------------------------------------

    def _change_in_group(self, run: MixedRun) -> None:
        """Apply a mixed run at once if it concerns one group and has the stream's block size, else part by part."""
        stored = run.stored
        group = stored.attention_group
        namespace = self._namespaces.get_or_add(group)
        is_one_group = group is not None or self._namespaces.groups_of_removal(None) in ([], [None])
        if namespace is None or not is_one_group:
            for part in run.parts():
                self.apply(part)
        elif not self._namespaces.accepts_stores(group, stored.spec_kind):
            self._counters.other_groups += len(stored.events.block_hashes)
        elif stored.num_positions and not self._size.admits(
            stored.block_size, is_on_device=is_device(*stored.location)
        ):
            for part in run.parts():
                self.apply(part)
        else:
            pages = self._translated(stored, self._seed_of_run(stored), namespace)
            self._tier_mapper.change(pages, run, namespace)

    # --- events of Mooncake's RFC #1527 -----------------------------------------------------------------------------

    def _apply_mooncake_event(self, event: MooncakeEvent) -> None:
        if (event.model_name or self._identity.model) != self._identity.model or (
            event.tenant_id or self._identity.tenant
        ) != self._identity.tenant:
            self._counters.foreign_events += 1
            other = shorten((event.model_name, event.tenant_id))
            self._limited_logger.warning("events of (model_name, tenant_id) %s left out: another stream's", other)
            return
        hashes = hashes_of(event)
        if event.event_type == "stored":
            namespace = self._namespaces.get_or_add(event.owner)
            if namespace is None:
                self._refuse_namespace(event.owner, len(hashes))
            else:
                self._store_mooncake_event(event, hashes, namespace)
        elif (namespace := self._namespaces.get(event.owner)) is not None:
            if event.event_type == "removed":
                self._tier_mapper.remove(hashes, namespace, Location(event.medium or ""))
            else:
                self._clear_namespace(namespace, event.medium)

    def _store_mooncake_event(self, event: MooncakeEvent, hashes: U64Array, namespace: HashNamespace) -> None:
        if not len(hashes):
            self._counters.unresolved_pages += 1  # a pooled object whose key is not a hash
        elif not event.token_ids:
            if event.block_size is not None and not self._size.admits(event.block_size, is_on_device=False):
                self._refuse_size(event.block_size, len(hashes))
                return
            seed = NamespaceSeed(self._seed(event.lora_name, event.additional_salt), is_stated=True)
            pages = self._hashes.remember(hashes, hashes, seed, namespace)
            self._tier_mapper.store(pages, namespace, Location(event.medium or ""))
        elif event.parent_hash is None and event.base_block_idx:
            self._counters.unknown_parents += len(hashes)
        else:
            self._store(StoredRun.of_mooncake_event(event, event.token_ids, self.block_size or 0), namespace)

    def _clear_namespace(self, namespace: HashNamespace, medium: str | None) -> None:
        """Remove one owner's pages from one medium, or from all."""
        self._counters.clears += 1
        hashes = self._hashes.block_hashes_in(namespace)
        if medium is None:
            self._tier_mapper.remove_everywhere(hashes, namespace)
        else:
            self._tier_mapper.remove(hashes, namespace, Location(medium))
