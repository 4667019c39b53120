"""The cause at which a prefix ends, from what the log shows about a stream."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from analysis.explain import messages
from analysis.explain.hash_rules import Column
from analysis.explain.page_history import NEVER, PageHistory, RemovalKind, leading
from analysis.explain.tracer import BeforeLog, PromptTracer, StreamTrace
from indexer.scores import StreamReuse, stream_reuse
from indexer.views import ViewState
from kv_events.hashing import U64Array
from kv_events.http.explanations import BatchPosition, Evidence, Finding, WorkerExplanation
from kv_events.runtime.words import count
from kv_events.schema import ENGINE_UNHEARD, MEDIA, NUM_MEDIA, REPLAYING, TIERS
from kv_events.streams import parse_group

_CAUSE_OF_LEAVING = {
    RemovalKind.REMOVED: "evicted",
    RemovalKind.CLEARED: "cleared",
    RemovalKind.RESYNCED: "not_resent",
}


class Elsewhere(NamedTuple):
    """Pages of the prompt that a worker holds under another namespace."""

    pages: int
    """Pages of the longest prefix held there."""
    tokens: int
    namespace: dict[str, str | int | bool | None]
    """See `Finding.namespace`."""
    first: BatchPosition
    """Stored the first page."""


class Causes:
    """The findings about one stream, from a log that has been followed."""

    def __init__(self, tracer: PromptTracer, history: StreamTrace) -> None:
        self._tracer = tracer
        self._history = history
        asked = tracer.hashes.asked(history.block_size)
        self._past = history.page_histories.get(asked.number)
        self._freshness = tracer.replay.freshness
        self.stream = history.stream
        self.state = self._freshness.state(history.view)
        self.state_reason = self._freshness.reason(history.view)
        self.hashes = asked.hashes
        """uint64[pages] the prompt's pages as this worker hashes them."""
        self.num_pages = len(asked.hashes)
        """Whole pages of the prompt."""
        self._held = history.view.index.tiers_held(asked.hashes, history.view.number)
        """[pages] bitmask of the tiers on which the view holds a page."""
        self.reuse = self._reuse()
        self.lengths = (self.num_pages,) * NUM_MEDIA
        """[4] pages of the longest prefix on each tier or a faster one; all of them without full attention."""
        if self.reuse.has_full:
            self.lengths = tuple(leading(self._held & np.uint8(2 ** (tier + 1) - 1)) for tier in range(NUM_MEDIA))
        self.longest = self.lengths[-1]

    def findings(self) -> list[Finding]:
        """Return the reasons why the prefix ends, the main one first."""
        found = [*self._of_the_worker(), *self._of_groups(), *self._prefix_end()]
        found += [*self._of_tiers(), *self._of_hidden_pages()] if self.reuse.has_full else []
        tail = self._tracer.prompt.num_tail_tokens(self._history.block_size)
        if not self.num_pages or (tail and self.longest == self.num_pages):
            text = messages.partial_page(tail, self._history.block_size, self.num_pages)
            found.append(Finding(cause="partial_page", page=self.num_pages + 1, text=text))
        text = f"The whole prompt, {count(self.num_pages, 'page')}, is held on the device."
        found = found or [Finding(cause="held", text=text)]
        if self.longest == self.num_pages and self.num_pages:
            found += self._doubts()
        return found

    def _doubts(self) -> Iterator[Finding]:
        """Yield why a view that holds the whole prompt may be wrong, and what that means."""
        if self.state not in (ViewState.LIVE, ViewState.EXPIRED):
            began = self._history.degraded_since or self._history.last
            text = messages.doubtful(self.state.value, self.state_reason, began, is_degraded=self._is_degraded)
            yield Finding(cause="stale", evidence=_evidence("doubted", began), text=text)

    @property
    def _is_degraded(self) -> bool:
        """Whether the view is right in what it holds, and its publisher does not know all of its worker."""
        view = self._history.view
        return view.state is ViewState.LIVE and view.degraded_reason not in ("", ENGINE_UNHEARD, REPLAYING)

    # --- the whole worker ---

    def _of_the_worker(self) -> Iterator[Finding]:
        history, block_size = self._history, self._tracer.prompt.query.block_size
        if self.state is ViewState.EXPIRED:
            text = messages.expired(
                history.last, self._tracer.replay.now, history.view.is_closed, self.longest, self.num_pages
            )
            yield Finding(cause="expired", evidence=_evidence("last_batch", history.last), text=text)
        if block_size is not None and block_size != history.block_size:
            longest, own = self.longest, history.block_size
            text = f"The query asks for pages of {block_size} tokens, and this worker uses pages of {own}, "
            text += f"of which it holds {longest} of {self.num_pages}."
            yield Finding(cause="other_namespace", pages=longest, namespace={"block_size": own}, text=text)

    # --- groups ---

    def _reuse(self) -> StreamReuse:
        stream, prompt = self._history.stream, self._tracer.prompt
        namespaces = self._tracer.replay.namespaces.find(stream.model, stream.tenant)
        namespace = next(each for each in namespaces if each.key.block_size == self._history.block_size)
        positions = prompt.query.num_positions(prompt.numbers)
        return stream_reuse(namespace, self._history.view, self.hashes, self._freshness, positions)

    def _of_groups(self) -> Iterator[Finding]:
        """Yield which group ends the reusable prefix before that of full attention."""
        reused = self.reuse.lengths[-1]
        if reused >= self.longest:
            return
        ends = self.reuse.ends
        name = min(ends, key=lambda each: ends[each], default=None)
        if name is None or ends[name] >= self.longest:
            text = f"Full attention holds {count(self.longest, 'page')}. "
            text += f"The engine computes the last token anyway, so it reuses {reused}."
            yield Finding(cause="last_token", page=reused + 1, text=text)
            return
        held = self.longest if self.reuse.has_full else None
        text = messages.group(held, parse_group(name), ends[name], reused, is_expired=name in self.reuse.expired)
        yield Finding(cause="group", page=reused + 1, group=name, text=text)

    # --- the end of the prefix ---

    def _prefix_end(self) -> Iterator[Finding]:
        page = self.longest
        if page == self.num_pages:
            return
        if self._past is not None and self._past.held[page]:
            stored = self._batch(self._past.stored[page])
            text = f"Page {page + 1} was stored {messages.when(stored)}, "
            text += "but the index had no room for it (KVSIGHT_MAX_PAGES)."
            yield Finding(cause="index_full", page=page + 1, evidence=_evidence("stored", stored), text=text)
        elif self._past is not None and self._past.stored[page] != NEVER:
            yield self._left(self._past, page)
            yield from self._why_view_may_lack(page, self._batch(self._past.left[page]))
        elif page in self._history.later:
            later = self._history.later[page]
            text = messages.stored_later(page, self.num_pages, later, self._tracer.replay.now)
            yield Finding(cause="stored_later", page=page + 1, evidence=_evidence("stored", later), text=text)
        elif (elsewhere := self._elsewhere(page)) is not None:
            yield found_elsewhere(elsewhere, page)
        else:
            yield next(self._why_view_may_lack(page, None), None) or self._never_stored(page)

    def _elsewhere(self, page: int) -> Elsewhere | None:
        """Return where the worker holds more of the prompt than these pages under another namespace."""
        found = best_elsewhere(self._tracer, self.stream.worker, self._history)
        return found if found is not None and found.tokens > page * self._history.block_size else None

    def _left(self, past: PageHistory, page: int) -> Finding:
        stored, left = self._batch(past.stored[page]), self._batch(past.left[page])
        medium = MEDIA[past.left_from[page]].value
        cause = _CAUSE_OF_LEAVING[RemovalKind(past.leaving[page])]
        if cause != "evicted" and stored.epoch != left.epoch:
            cause = "restarted"
        what = {"evicted": "removed", "not_resent": "resync_ended"}.get(cause, cause)
        first_medium = MEDIA[int(np.argmax(past.stored_on[page] == past.stored[page]))].value
        evidence = _evidence("stored", stored, first_medium)
        text = messages.left(cause, page, self.num_pages, stored, left, medium, int(past.times_stored[page]))
        earlier = [
            (number, tier)
            for tier, number in enumerate(past.left_on[page].tolist())
            if tier != past.left_from[page] and past.stored[page] < number <= past.left[page]
        ]
        for number, tier in sorted(earlier):
            evidence += _evidence("removed", self._batch(number), MEDIA[tier].value)
            text += f" It had left {MEDIA[tier].value} {messages.at(self._batch(number))}."
        gap = self._history.gaps_before.get(int(past.left[page])) if cause in ("not_resent", "restarted") else None
        if gap is not None and gap.before is not None:
            evidence += [*_evidence("before_gap", gap.before), *_evidence("after_gap", gap.after)]
            text += f" Before it, {messages.missing(gap)}, which may have removed the page."
        replacement = self._history.replacements.get(int(past.left[page]))
        decision = None
        if replacement is not None:
            worker = self.stream.worker
            decision = self._tracer.decisions.with_page(replacement.first_hash, worker, replacement.batch.time)
            text += messages.replaced(replacement, left, decision, has_decisions=bool(self._tracer.decisions))
        evidence += _evidence(what, left, medium)
        request_id = None if decision is None else decision.request_id
        return Finding(cause=cause, page=page + 1, request_id=request_id, evidence=evidence, text=text)

    def _why_view_may_lack(self, page: int, since: BatchPosition | None) -> Iterator[Finding]:
        """Yield why the view may lack a page that its worker holds. since: the last that the log shows of the page."""
        gap = next((gap for gap in self._history.gaps if since is None or gap.after.seq > since.seq), None)
        if gap is not None and gap.before is None:
            text = messages.before_the_log(page, gap, self._history.resync)
            evidence = _evidence("first_batch", gap.after)
            yield Finding(cause="before_the_log", page=page + 1, evidence=evidence, text=text)
        elif gap is not None and gap.before is not None:
            evidence = [*_evidence("before_gap", gap.before), *_evidence("after_gap", gap.after)]
            text = messages.lost(page, gap, len(self._history.gaps), self._history.resync)
            yield Finding(cause="lost_batches", page=page + 1, evidence=evidence, text=text)
        elif self.state not in (ViewState.LIVE, ViewState.EXPIRED):
            began = self._history.degraded_since or self._history.last
            evidence = _evidence("doubted", began)
            text = messages.stale(page, self.state.value, self.state_reason, began, self._history.resync)
            yield Finding(cause="stale", page=page + 1, evidence=evidence, text=text)

    def _never_stored(self, page: int) -> Finding:
        history, evidence = self._history, list[Evidence]()
        if page == 0 or self._past is None:
            text = messages.never_stored(page, self.num_pages, history.first)
        else:
            last = self._batch(self._past.stored[page - 1])
            evidence = _evidence("last_page_stored", last)
            text = messages.not_continued(page, self.num_pages, last, history.first)
        others, num_common = self._continuations(page)
        if others:
            own_size = history.block_size
            text += messages.continuations(page, others, page * own_size + num_common if num_common else None)
            return Finding(cause="other_prompt", page=page + 1, pages=others, evidence=evidence, text=text)
        if page:
            text += f" No page follows page {page} here."
        elif not history.has_tokens and self._tracer.prompt.tokens is not None:
            query = self._tracer.prompt.query
            text += messages.other_names(query.lora_name, query.cache_salt, sum(history.view.num_pages))
        return Finding(cause="never_stored", page=page + 1, evidence=evidence, text=text)

    def _continuations(self, page: int) -> tuple[int, int]:
        """Return how many other pages are held in place of a page, and the most tokens that one has in common with it.

        Prompts that have no page in common with this one count only if they share tokens of the first one.
        """
        view, found = self._history.view, self._history.partings.get(page, {})
        known = np.array(list(found), np.uint64)
        held = known[view.index.tiers_held(known, view.number) != 0] if len(known) else known
        num_common = max((found[each] for each in held.tolist()), default=0)
        if not page:
            return len(held), num_common
        parent = self.hashes[page - 1]
        return sum(int((part.parents == parent).sum()) for part in view.index.stream_pages(view.number)), num_common

    # --- tiers and holes ---

    def _of_tiers(self) -> Iterator[Finding]:
        """Yield why the prefix on a faster tier ends before that on all tiers."""
        past, ends = self._past, set[int]()
        for tier, page in enumerate(self.lengths[:-1]):
            if page == self.longest or page in ends or past is None:
                continue
            ends.add(page)
            now_on = int(np.flatnonzero(self._held[page] >> np.arange(NUM_MEDIA) & 1)[0])
            stored = self._batch(past.stored_on[page, now_on])
            evidence = _evidence("stored", stored, MEDIA[now_on].value)
            left_tiers = [each for each in range(now_on) if past.left_on[page, each] != NEVER]
            left_tier = max(left_tiers, key=lambda each: int(past.left_on[page, each]), default=None)
            if left_tier is None:
                text = messages.slower_tier(page, MEDIA[now_on].value, MEDIA[tier].value, stored)
                yield Finding(cause="slower_tier", page=page + 1, tier=TIERS[tier], evidence=evidence, text=text)
                continue
            left = self._batch(past.left_on[page, left_tier])
            source, target = MEDIA[left_tier].value, MEDIA[now_on].value
            text = f"Page {page + 1} was moved from {source} to {target}: stored there {messages.when(stored)}, "
            text += f"removed from {source} {messages.at(left)}."
            evidence += _evidence("removed", left, source)
            evidence.sort(key=lambda each: (each.batch.time, each.batch.seq))
            yield Finding(cause="moved", page=page + 1, tier=TIERS[tier], evidence=evidence, text=text)

    def _of_hidden_pages(self) -> Iterator[Finding]:
        end = self.longest
        hidden = np.flatnonzero(self._held[end:])
        if len(hidden):
            first = end + int(hidden[0])
            verb = "is" if len(hidden) == 1 else "are"
            text = f"{count(len(hidden), 'page')} from page {first + 1} on {verb} held, "
            text += f"but hidden by the hole at page {end + 1}."
            yield Finding(cause="hidden", page=first + 1, pages=len(hidden), text=text)

    def _batch(self, number: int) -> BatchPosition:
        return self._tracer.batches[number]


def best_elsewhere(tracer: PromptTracer, worker: str, asked: StreamTrace | None) -> Elsewhere | None:
    """Return where a worker holds most of the prompt under another namespace than the one asked for.

    asked: the worker's stream under the model and tenant of the query. None: it has none.
    """
    found = (
        place for history in tracer.by_worker.get(worker, {}).values() for place in _places(tracer, history, asked)
    )
    return max(found, key=lambda place: place.tokens, default=None)


def _places(tracer: PromptTracer, history: StreamTrace, asked: StreamTrace | None) -> Iterator[Elsewhere]:
    prompt, hashes = tracer.prompt, tracer.hashes
    is_asked = (history.stream.model, history.stream.tenant) == (prompt.query.model, prompt.query.tenant)
    names: dict[str, str | int | bool | None] = {}
    if history.stream.model != prompt.query.model:
        names["model"] = history.stream.model
    if history.stream.tenant != prompt.query.tenant:
        names["tenant"] = history.stream.tenant
    asked_rule = hashes.asked((asked or history).block_size).rule
    own = hashes.asked(history.block_size)
    for number, past in history.page_histories.items():
        variant = hashes.variants[number]
        pages = past.prefix
        if not pages or (is_asked and variant.number == own.number):
            continue
        rule = variant.rule if variant.column is Column.SEQUENCE else history.rules.get(number)
        different = {} if rule is None else rule.differences(asked_rule)
        first = tracer.batches[int(past.stored[0])]
        yield Elsewhere(pages, pages * (variant.rule.block_size or history.block_size), names | different, first)


def found_at_best(tracer: PromptTracer, causes: Causes, best: WorkerExplanation, hashes: U64Array) -> Finding:
    """Return the finding that another worker holds more of a prompt. hashes: of the pages that it holds."""
    last = int(hashes[best.held["external"] - 1])
    decision = tracer.decisions.with_page(last, best.instance_id, tracer.replay.now)
    text = messages.held_by(best.instance_id, best.held["external"], best.num_pages, decision)
    return Finding(
        cause="held_elsewhere",
        page=causes.longest + 1,
        pages=best.held["external"],
        worker=best.instance_id,
        request_id=None if decision is None else decision.request_id,
        text=text,
    )


def found_elsewhere(elsewhere: Elsewhere, page: int | None) -> Finding:
    """Return the finding that a worker holds the prompt under another namespace. page: the end of its prefix."""
    return Finding(
        cause="other_namespace",
        page=None if page is None else page + 1,
        pages=elsewhere.pages,
        namespace=elsewhere.namespace,
        evidence=_evidence("stored", elsewhere.first),
        text=messages.other_namespace(elsewhere.namespace, elsewhere.pages, elsewhere.first),
    )


def _evidence(what: str, batch: BatchPosition, medium: str | None = None) -> list[Evidence]:
    """Return one thing that a batch did, or nothing for what precedes the log."""
    return [] if isinstance(batch, BeforeLog) else [Evidence(what=what, medium=medium, batch=batch)]
