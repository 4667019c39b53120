"""The findings in plain sentences. `page` is counted from 0 here and from 1 in the texts."""

import re
from collections.abc import Mapping

from analysis.explain.tracer import BeforeLog, Gap, Replacement
from kv_events.decisions import Decision
from kv_events.http.explanations import BatchPosition
from kv_events.log.moments import utc_text
from kv_events.runtime.words import count, printable
from kv_events.streams import Group

_SIZES = re.compile(r"block size (\d+), registered with \d+")
_FIELDS = {
    "model": "model",
    "tenant": "tenant",
    "block_size": "pages of",
    "lora_name": "LoRA adapter",
    "cache_salt": "cache salt",
    "seed": "hash seed",
    "is_bigram": "token pairs",
}


def at(batch: BatchPosition) -> str:
    """Return when and where a batch is in the log."""
    return f"at {utc_text(batch.time)} ({where(batch)})"


def when(batch: BatchPosition) -> str:
    """Return when something happened, which may be unknown if it was before the log begins."""
    return "before the log begins" if isinstance(batch, BeforeLog) else at(batch)


def where(batch: BatchPosition) -> str:
    """Return where a batch is in the log."""
    if isinstance(batch, BeforeLog):
        return f"batch {batch.seq}, before the log begins"
    record = f"offset {batch.partition}:{batch.offset}" if batch.index is None else f"record {batch.index}"
    return f"{record}, batch {batch.seq}"


def partial_page(tail: int, block_size: int, num_pages: int) -> str:
    if not num_pages:
        return f"The prompt of {count(tail, 'token')} is shorter than a page of {block_size}."
    held = f"All whole pages ({num_pages}) are held"
    return f"{held}; the last {count(tail, 'token')} do not fill a page of {block_size}."


def expired(last: BatchPosition, now: float, is_closed: bool, longest: int, num_pages: int) -> str:
    held = f"It is left out of answers; its view holds {longest} of {count(num_pages, 'page')}."
    if is_closed:
        return f"Its publisher was closed {at(last)}. {held}"
    return f"It was last heard {at(last)}, {now - last.time:.1f} s before this moment. {held}"


def left(
    cause: str, page: int, num_pages: int, stored: BatchPosition, left: BatchPosition, medium: str, times: int
) -> str:
    again = f", the last of {times} times," if times > 1 else ""
    was = f"Page {page + 1} of {num_pages} was stored {when(stored)}{again}"
    later = at(left) if isinstance(stored, BeforeLog) else f"{left.time - stored.time:.1f} s later, {at(left)}"
    if cause == "evicted":
        stores = f" and stores {left.pages_stored}" if left.pages_stored else ""
        batch = f"That batch removes {count(left.pages_removed, 'page')}{stores}."
        return f"{was} and evicted from {medium} {later}. {batch}"
    if cause == "cleared":
        return f"{was}. The worker cleared its cache {later}."
    if cause == "restarted":
        why = "the engine or its publisher restarted, or the engine was not heard for too long"
        return f"{was}. A new epoch dropped the page {later}: {why}."
    return f"{was}. The worker resent all that it holds, without this page; the resync ended {later}."


def lost(page: int, gap: Gap, num_gaps: int, resync: BatchPosition | None) -> str:
    numbers, between = _numbers(gap)
    more = f" ({num_gaps} gaps since the view was last right)" if num_gaps > 1 else ""
    return f"Page {page + 1} may have been stored in {numbers}, lost: {between}{more}. {_since(resync)}."


def _numbers(gap: Gap) -> tuple[str, str]:
    several = gap.first_seq != gap.last_seq
    numbers = f"batches {gap.first_seq} to {gap.last_seq}" if several else f"batch {gap.first_seq}"
    start = "" if gap.before is None else f"{where(gap.before)} and "
    return numbers, f"between {start}{where(gap.after)}, {utc_text(gap.after.time)}"


def missing(gap: Gap) -> str:
    numbers, between = _numbers(gap)
    return f"{numbers} {'were' if gap.first_seq != gap.last_seq else 'was'} lost {between}"


def replaced(replacement: Replacement, left: BatchPosition, decision: Decision | None, *, has_decisions: bool) -> str:
    """What took the place of an evicted page. left: the batch of the eviction. has_decisions: whether the log has."""
    batch = replacement.batch
    text = "" if batch.seq == left.seq else f" {count(batch.pages_stored, 'page')} took the place {at(batch)}."
    text += f" The first one stored is {replacement.first_hash:016x}"
    if decision is not None or has_decisions:
        text += f", of {'no request in the log' if decision is None else 'request ' + printable(decision.request_id)}"
    held = f"The worker held {count(replacement.pages_before, 'page')} before, and {replacement.pages_after:,} after."
    return f"{text}. {held}"


def stored_later(page: int, num_pages: int, later: BatchPosition, now: float) -> str:
    after = f"{max(0.0, later.time - now):.3f} s after this moment"
    return f"Page {page + 1} of {num_pages} is not stored yet: it is stored {at(later)}, {after}."


def continuations(page: int, others: int, parts_after: int | None) -> str:
    """Other pages are held in place of a page. parts_after: tokens that one of them shares with the prompt."""
    verb = "follows" if others == 1 else "follow"
    text = f" Of other prompts, {count(others, 'page')} {verb} page {page} here." if page else ""
    if parts_after is not None:
        text += f" Another prompt parts at token {parts_after + 1}, inside page {page + 1}."
    return text


def other_names(lora_name: str | None, cache_salt: str | None, held: int) -> str:
    """The worker may hold the prompt under names that the log does not contain."""
    asked = [f"LoRA adapter {lora_name}" if lora_name else "no LoRA adapter"]
    asked.append("this cache salt" if cache_salt else "no cache salt")
    if not held:
        return ""
    return (
        f" That holds under {' and '.join(asked)}: whether the {count(held, 'page')} that it holds are of other ones, "
        "the log does not tell. If its requests have any, ask with `lora_name` and `cache_salt`."
    )


def held_by(worker: str, held: int, num_pages: int, decision: Decision | None) -> str:
    text = f"{printable(worker)} holds most of the prompt, {held} of {count(num_pages, 'page')}"
    if decision is None:
        return f"{text}."
    return f"{text}: request {printable(decision.request_id)} was sent there at {utc_text(decision.timestamp)}."


def before_the_log(page: int, gap: Gap, resync: BatchPosition | None) -> str:
    begins = f"The log begins with batch {gap.after.seq} of this worker, {at(gap.after)}"
    return (
        f"{begins}. Page {page + 1} may have been stored in an earlier one, which is not in the log. {_since(resync)}."
    )


def _since(resync: BatchPosition | None) -> str:
    return "No resync has begun" if resync is None else f"A resync began {when(resync)} and has not ended"


def stale(page: int, state: str, reason: str, began: BatchPosition, resync: BatchPosition | None) -> str:
    if resync is not None:
        return f"A resync began {when(resync)} and has not ended, so page {page + 1} may still come."
    since = "from before the log begins" if isinstance(began, BeforeLog) else utc_text(began.time)
    begins = f"The view is {state} ({reason}) since {since} ({where(began)})"
    text = f"{begins}: page {page + 1} may be missing only in the view."
    sizes = _SIZES.fullmatch(reason)
    if sizes is not None:
        text += (
            f" The engine's pages have {sizes[1]} tokens: register it again with `block_size` {sizes[1]}, or without."
        )
    return text


def doubtful(state: str, reason: str, began: BatchPosition, *, is_degraded: bool) -> str:
    """The view holds the whole prompt, but is not live."""
    since = "from before the log begins" if isinstance(began, BeforeLog) else utc_text(began.time)
    means = "the pages in it are right, others may be missing" if is_degraded else "some of these pages may be gone"
    return (
        f"But the view is {state} ({reason}) since {since} ({where(began)}): {means}. "
        "Routers still count them; a worker whose view is live is the safer choice."
    )


def never_stored(page: int, num_pages: int, first: BatchPosition) -> str:
    if isinstance(first, BeforeLog):
        return f"Page {page + 1} of {num_pages} was not held when the log begins, and no batch in it stores the page."
    return f"Page {page + 1} of {num_pages} was never stored; the worker's first batch in the log came {at(first)}."


def not_continued(page: int, num_pages: int, last: BatchPosition, first: BatchPosition) -> str:
    """No batch stores the page, but those before it. first: of the worker."""
    never = "was not held when the log begins, nor stored since" if isinstance(first, BeforeLog) else "was never stored"
    return f"Page {page + 1} of {num_pages} {never}; page {page}, the last one held, was stored {when(last)}."


def slower_tier(page: int, medium: str, tier: str, stored: BatchPosition) -> str:
    if isinstance(stored, BeforeLog):
        return f"Page {page + 1} was on {medium} and not on {tier} when the log begins, and was not stored there since."
    return f"Page {page + 1} was stored on {medium} {at(stored)}, and never on {tier}."


def group(held: int | None, group: Group, end: int, reused: int, *, is_expired: bool) -> str:
    """A group of layers ends the prefix. held: pages that full attention holds. None: the engine has none."""
    after = f"after page {end}" if end else "at the end of any page"
    if is_expired:
        why = f"its group {group.name} has expired"
    elif group.kind == "eagle":
        why = "the engine computes one more page for EAGLE"
    elif group.kind == "step":
        why = f"a reused prefix is a multiple of {group.size} tokens"
    elif group.kind == "mamba":
        why = f"no mamba state {after}"
    else:
        what = "window" if group.kind == "swa" else "chunk"
        why = f"no complete {what} of {group.size} tokens {after}"
    has = "The engine has no full attention" if held is None else f"Full attention holds {count(held, 'page')}"
    return f"{has}, {why}. The engine can reuse {count(reused, 'page')}."


def other_namespace(namespace: Mapping[str, str | int | bool | None], number: int, first: BatchPosition) -> str:
    held = f"The worker holds {count(number, 'page')} of this prompt"
    stored = f"the first one stored {when(first)}"
    if not namespace:
        return f"{held} under another LoRA adapter, cache salt or hash seed, which the log does not show; {stored}."
    return f"{held} under {', '.join(_difference(*each) for each in namespace.items())}; {stored}."


def _difference(field: str, value: str | int | bool | None) -> str:
    name = _FIELDS[field]
    if value is None:
        return f"no {name}"
    if field == "block_size":
        return f"{name} {value} tokens"
    if field == "is_bigram":
        return name if value else f"no {name}"
    return f"{name} {value}"
