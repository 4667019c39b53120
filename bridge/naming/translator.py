"""An engine's events -> pages by their sequence hashes, into the publisher of one worker stream.

Names are computed here, where the tokens are. What cannot be named, or speaks for less than a whole prefix, is left out
and counted: a router may rather miss a page than trust one that is not there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from bridge.counters import BridgeCounters
from bridge.decoding.envelopes import Envelope
from bridge.decoding.runs import BadEvent, ClearedRun, MixedRun, Place, RemovedRun, Run, StoredRun, hashes_of
from bridge.naming.extra_keys import local_hashes_with_objects, read_extra_keys
from bridge.naming.hash_translator import NamedPages, Names, Space, Wording
from bridge.naming.identity import Identity
from bridge.naming.media import is_device
from bridge.naming.namespaces import Spaces
from bridge.naming.page_size import PageSize
from bridge.naming.tier_mapper import Placer
from kv_events.errors import shorten
from kv_events.hashing import U64Array, local_hashes, namespace_seed
from kv_events.limits import MAX_BLOCK_SIZE
from kv_events.rate_limited_log import RateLimitedLog
from publisher.publisher import EventPublisher

_seed_of = lru_cache(4096)(namespace_seed)


class Translator:
    """State of one worker stream: what is remembered of its pages. Publishes as soon as the block size is known."""

    def __init__(
        self,
        identity: Identity,
        counters: BridgeCounters,
        limited_log: RateLimitedLog,
        make_publisher: Callable[[int], EventPublisher],
        *,
        block_size: int | None,
        ledger_pages: int,
        name_pages: int,
    ) -> None:
        """block_size: None: as stores say. make_publisher: called with it, and again should it prove to be another one.
        ledger_pages: how many pages a publisher takes for held. name_pages: how many other pages' names are remembered.
        """
        self._identity = identity
        self._counters = counters
        self._limited_log = limited_log
        self._make_publisher = make_publisher
        self._names = Names(ledger_pages, name_pages)
        self._spaces = Spaces()
        self._placer = Placer(counters, limited_log)
        self._size = PageSize(block_size)
        if block_size is not None:
            self.publisher = make_publisher(block_size)

    @property
    def publisher(self) -> EventPublisher | None:
        """None: the block size is not known yet."""
        return self._placer.publisher

    @publisher.setter
    def publisher(self, publisher: EventPublisher) -> None:
        publisher.share_blocks(self._names.blocks)
        self._placer.publisher = publisher

    @property
    def block_size(self) -> int | None:
        """Tokens a page; None: not known yet."""
        return self._size.tokens

    @property
    def size_doubt(self) -> str:
        """Not empty while stores came, and none of the size that was told: names both sizes."""
        return self._size.doubt

    @property
    def num_names(self) -> int:
        """Pages whose names are remembered."""
        return len(self._names)

    def apply(self, run: Run) -> None:
        """Take one run of events."""
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
            case Envelope():
                self._open_envelope(run)
            case BadEvent():
                self._counters.bad_events[run.reason] += 1
                if run.may_remove:
                    self.clear()

    def begin_anew(self, publisher: EventPublisher) -> None:
        """It may be another incarnation: nothing is held, by another publisher. Names stay, because it may be the same
        one, too; engines' hashes go by contents, so that another one's mean the same pages or nothing at all.
        """
        self.publisher = publisher
        self.clear()
        self._size.forget_proof()

    def clear(self) -> None:
        """Nothing is held any more. Names stay: an engine's hash goes on to mean the same page."""
        self._placer.clear()

    # --- stores -----------------------------------------------------------------------------------------------------

    def _store_in_group(self, run: StoredRun) -> None:
        space = self._spaces.space(run.group)
        if space is None:
            self._refuse_space(run.group, len(run.events.block_hashes))
        elif self._spaces.takes_stores(run.group, run.spec_kind):
            self._store(run, space)
        else:
            self._counters.other_groups += len(run.events.block_hashes)

    def _store(self, run: StoredRun, space: Space) -> None:
        wording = self._wording(run)
        if run.num_positions == 0:
            named = self._names.recall(run.events.block_hashes, wording, space)
            self._counters.unresolved_pages += len(run.events.block_hashes) - len(named.columns.hashes)
        else:
            whole = self._whole_pages(run)
            if whole is None:
                return
            named = self._named(whole, wording, space)
        self._placer.store(named, space, run.place)

    def _wording(self, run: StoredRun) -> Wording:
        return Wording(self._seed(run.lora_name, run.cache_salt), bool(run.cache_salt))

    def _seed(self, lora_name: str | None, cache_salt: str | None) -> int:
        return _seed_of(lora_name or self._identity.lora_name, cache_salt or self._identity.cache_salt)

    def _named(self, run: StoredRun, wording: Wording, space: Space) -> NamedPages:
        """Name pages by their tokens."""
        objects: list[list[int]] = []
        if run.extra_keys:
            begins_prompt = not run.events.has_parent[0]
            extra = read_extra_keys(run.extra_keys, run.lora_name, run.cache_salt, begins_prompt=begins_prompt)
            objects = extra.objects
            if extra.salt:
                self._counters.guessed_salts += 1
                wording = Wording(self._seed(run.lora_name, extra.salt), is_whole_truth=False)
        size = max(1, run.block_size)  # 0 where all of a run are removals

        def hashed(start: int, num_pages: int, seed: int) -> U64Array:
            tokens = run.tokens[start * size : (start + num_pages) * size + run.is_bigram]
            if any(objects):
                return local_hashes_with_objects(tokens, objects, size, seed, is_bigram=run.is_bigram)
            return local_hashes(tokens, size, seed, is_bigram=run.is_bigram)

        local = hashed(0, run.num_positions // size, wording.seed)
        named = self._names.name(run.events, local, hashed, wording, space)
        if named.num_unknown:
            self._counters.unknown_parents += named.num_unknown
            self._limited_log.warning("%d stored pages left out: parent_block_hash is not known", named.num_unknown)
        return named

    def _whole_pages(self, run: StoredRun) -> StoredRun | None:
        """The run as far as its pages are full and of the stream's size; None: not at all."""
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
        size, is_on_device = run.block_size, is_device(*run.place)
        if 1 <= size <= min(MAX_BLOCK_SIZE, run.num_positions) and self._size.is_news(
            size, len(run.events.lengths), is_on_device=is_on_device
        ):
            self._begin_with_size(size)
        return self._size.admits(size, is_on_device=is_on_device)

    def _begin_with_size(self, block_size: int) -> None:
        publisher = self._make_publisher(block_size)
        self.clear()
        self._names.clear()
        self.publisher = publisher
        self._size.learn(block_size)

    def _refuse_size(self, block_size: int, num_pages: int) -> None:
        self._counters.other_block_sizes += num_pages
        self._limited_log.warning("pages of block_size %d left out, the stream's is %s", block_size, self._size.tokens)

    def _refuse_space(self, key: str | int | None, num_pages: int) -> None:
        self._counters.refused_spaces += num_pages
        self._limited_log.warning("pages of %s left out: too many groups and owners have pages", shorten(key))

    # --- removals ---------------------------------------------------------------------------------------------------

    def _remove_in_group(self, run: RemovedRun) -> None:
        for group in self._spaces.meant_by(run.group):
            takes_removals, space = self._spaces.takes_removals(group), self._spaces.known(group)
            if takes_removals and space is not None:
                self._placer.remove(run.block_hashes, space, run.place)
            elif takes_removals is not None:
                self._counters.other_groups += len(run.block_hashes)

    # --- both in turn -----------------------------------------------------------------------------------------------

    def _change_in_group(self, run: MixedRun) -> None:
        """All at once where all means the same group and the stream's page size; else part by part."""
        stored = run.stored
        space = self._spaces.space(stored.group)
        is_one_group = stored.group is not None or self._spaces.meant_by(None) in ([], [None])
        if space is None or not is_one_group:
            for part in run.parts():
                self.apply(part)
        elif not self._spaces.takes_stores(stored.group, stored.spec_kind):
            self._counters.other_groups += len(stored.events.block_hashes)
        elif stored.num_positions and not self._size.admits(stored.block_size, is_on_device=is_device(*stored.place)):
            for part in run.parts():
                self.apply(part)
        else:
            self._placer.change(self._named(stored, self._wording(stored), space), run, space)

    # --- RFC #1527 --------------------------------------------------------------------------------------------------

    def _open_envelope(self, event: Envelope) -> None:
        if (event.model_name or self._identity.model) != self._identity.model or (
            event.tenant_id or self._identity.tenant
        ) != self._identity.tenant:
            self._counters.foreign_events += 1
            whose = shorten((event.model_name, event.tenant_id))
            self._limited_log.warning("events of (model_name, tenant_id) %s left out: another stream's", whose)
            return
        hashes = hashes_of(event)
        if event.event_type == "stored":
            space = self._spaces.space(event.owner)
            if space is None:
                self._refuse_space(event.owner, len(hashes))
            else:
                self._store_envelope(event, hashes, space)
        elif (space := self._spaces.known(event.owner)) is not None:
            if event.event_type == "removed":
                self._placer.remove(hashes, space, Place(event.medium or ""))
            else:
                self._clear_space(space, event.medium)

    def _store_envelope(self, event: Envelope, hashes: U64Array, space: Space) -> None:
        if not len(hashes):
            self._counters.unresolved_pages += 1  # a pool's object whose key is no hash
        elif not event.token_ids:
            if event.block_size is not None and not self._size.admits(event.block_size, is_on_device=False):
                self._refuse_size(event.block_size, len(hashes))
                return
            wording = Wording(self._seed(event.lora_name, event.additional_salt), is_whole_truth=True)
            named = self._names.enter(hashes, hashes, wording, space)
            self._placer.store(named, space, Place(event.medium or ""))
        elif event.parent_hash is None and event.base_block_idx:
            self._counters.unknown_parents += len(hashes)
        else:
            self._store(StoredRun.of_envelope(event, event.token_ids, self.block_size or 0), space)

    def _clear_space(self, space: Space, medium: str | None) -> None:
        """One owner's pages on one medium are gone."""
        self._counters.clears += 1
        hashes = self._names.block_hashes_in(space)
        if medium is None:
            self._placer.remove_everywhere(hashes, space)
        else:
            self._placer.remove(hashes, space, Place(medium))
