"""Follows one prompt: from the engine through its events into the index, and compares what both hold."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from kv_events.hash_seed import SEED, SEED_VARIABLE, process_seed
from kv_events.http.queries import PeerAnswer
from kv_events.http.workers import Listener, Worker
from kv_events.records import LogRecord
from kv_events.runtime.words import count, duration, names
from kv_events.schema import CLOSED
from kv_events.streams import split_group
from kvsight.cli.doctor.checks import BrokenError, SkippedError
from kvsight.cli.doctor.servers import Servers
from kvsight.cli.shared.console import UsageError
from kvsight.cli.shared.engine_client import ClockReading, EngineClient
from kvsight.cli.shared.process import run_until_interrupted
from kvsight.cli.shared.streams import StreamRow, rows_of, trouble_text
from kvsight.errors import KvsightHttpError

if TYPE_CHECKING:
    from indexer.settings import IndexerSettings

_PROMPT_PAGES = 4
_LARGEST_USUAL_PAGE = 64
_PLAIN_TOKENS = range(100, 20_000)
"""Token ids that are ordinary text in every usual vocabulary."""
_POLL_S = 0.05
_MAX_CLOCK_SKEW_S = 2.0
_DATE_ERROR_S = 0.5
"""Half of the resolution of an HTTP date."""
_ENGINE_BINDS = "set the engine's `endpoint` to tcp://*:PORT (with an address for * it connects, and nobody answers)"
_WRONG_PAGES = "block size "
"""Beginning of what is wrong with an engine that is registered with another block size."""


class Arrival(NamedTuple):
    """A batch that was added to the topic while this command was listening."""

    model: str
    tenant: str
    worker: str
    pages_stored: int
    degraded_reason: str
    ahead_s: float
    """How far the publisher's clock is ahead of this machine's; less by the time that the batch took."""


@dataclass
class PromptTrace:
    """One prompt, and what the checks have found out about it so far."""

    servers: Servers
    engine: EngineClient | None
    prompt: list[int] | str | None
    """Tokens or text. None: random tokens, so that each run sees new events."""
    model: str | None
    worker: str | None
    tenant: str
    wait_s: float
    """Longest wait for events."""

    tokens: list[int] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    _served: str = ""
    _engine_block_size: int | None = None
    _is_known: bool = False
    """Whether the index held the prompt before it was sent. No events are expected then."""
    _cached_before: int | None = None
    """Tokens of the prompt that the engine had in its cache when it was sent first."""

    # --- the engine and its events ----------------------------------------------------------------------------------

    def engine_answers(self) -> str:
        """Ask the engine for its model and its block size, and prepare the prompt."""
        engine = self._require_engine()
        self._served = engine.model()
        self.model = self.model or self._served
        self._engine_block_size = engine.block_size()
        self.tokens = self._prompt_tokens(engine)
        self._check_length(self._engine_block_size or 0)
        pages = f", pages of {self._engine_block_size} tokens" if self._engine_block_size else ""
        return f"{engine.url} serves {self._served}{pages}"

    def events(self) -> str:
        """Send the prompt, and wait for its events on the topic and in the service."""
        self._is_known = bool(self.tokens) and bool(self._held())
        before = self._stored()
        if self.servers.settings.kafka is not None:
            self._listen()
            self._judge_arrivals()
        else:
            self._send()
        self._wait_for(lambda: self._fault_of_workers(before))
        live = [worker.instance_id for worker in self._workers() if worker.state == "live"]
        sent = " and hold the prompt already" if self._is_known else " and store the prompt" if self.tokens else ""
        warned = "".join(f"; {name}: {each.warning}" for name, each in _listeners(self._workers()) if each.warning)
        return (f"events of {names(live)} arrive{sent}" if live else "events of the prompt arrive") + warned

    def clocks(self) -> str:
        """Compare all clocks that can be read with this machine's."""
        return _judge_clocks(dict(self._clocks()))

    # --- the pages of the prompt ------------------------------------------------------------------------------------

    def block_size(self) -> str:
        """Compare the engine's block size with that of its pages in the index."""
        for fault in self._faults():
            if _WRONG_PAGES in fault:
                raise BrokenError(fault, "register the engine with the block size that it reports")
        self._require_engine()
        indexed = sorted({worker.block_size for worker in self._workers()})
        if self._engine_block_size is None:
            raise SkippedError(f"the engine does not report its block size; the index has pages of {_either(indexed)}")
        if self._engine_block_size not in indexed:
            text = f"the engine has pages of {self._engine_block_size} tokens, the index pages of {_either(indexed)}"
            raise BrokenError(text, "configure the publisher, or register the engine, with the engine's block size")
        return f"the engine and the index have pages of {self._engine_block_size} tokens"

    def hash_seed(self) -> str:
        """Look for the prompt in the index by its tokens, which the service hashes, and by hashes of known seeds."""
        self._require_engine()
        self._check_length(self._page_tokens())
        self._wait_for(lambda: None if self._held() or self._matching_seed() is not None else self._fault_of_hashes())
        if not self._held():
            raise self._fault_of_hashes()
        seed = self._matching_seed()
        return "the engine's pages have the hashes that the service computes" + (
            f", with the seed {seed}" if seed is not None else f"; {SEED_VARIABLE} of this command is another one"
        )

    def answer(self) -> str:
        """Send the prompt again, and compare the pages that the engine reuses with those that the index reports."""
        cached, expected = self._require_engine().complete(self._served, self.tokens), self._num_reusable()
        reused = expected if cached is None else cached // self._page_tokens()
        self._wait_for(lambda: self._fault_of_answer(reused, is_reported=cached is not None))
        pages = f"{reused} of {count(expected, 'page')}"
        if cached is None:
            report = "--enable-prompt-tokens-details (vLLM) or --enable-cache-report (SGLang)"
            raise SkippedError(f"the index has {pages}; the engine reports no cached_tokens without {report}")
        return f"the engine reuses {pages}, as the index reports for {self._holder()}"

    # --- parts ------------------------------------------------------------------------------------------------------

    def _require_engine(self) -> EngineClient:
        if self.engine is None:
            raise SkippedError("no --engine")
        return self.engine

    def _prompt_tokens(self, engine: EngineClient) -> list[int]:
        if isinstance(self.prompt, str):
            return engine.tokenize(self._served, self.prompt)
        if self.prompt is not None:
            return self.prompt
        number = _PROMPT_PAGES * (self._engine_block_size or _LARGEST_USUAL_PAGE) + 1
        return random.SystemRandom().choices(_PLAIN_TOKENS, k=number)

    def _check_length(self, block_size: int) -> None:
        if len(self.tokens) <= block_size:
            raise UsageError(f"--prompt has {count(len(self.tokens), 'token')}; give more than {block_size}, one page")

    def _send(self) -> None:
        if self.engine is not None:
            self._cached_before = self.engine.complete(self._served, self.tokens)

    def _workers(self) -> list[Worker]:
        found = self.servers.client.workers(self.model, self.tenant)
        return [worker for worker in found if self.worker in (None, worker.instance_id)]

    def _faults(self) -> list[str]:
        """What the bridge or the service says is wrong with the workers' streams."""
        texts = ((name, each.failure or each.stale_reason) for name, each in _listeners(self._workers()))
        return [f"{name}: {text}" for name, text in texts if text]

    def _stored(self) -> int:
        return sum(each.counters.get("pages_stored", 0) for _, each in _listeners(self._workers()))

    def _held(self) -> dict[str, int]:
        """Worker -> tokens of the prompt that the index reports, for those that hold any."""
        return self._tokens_in(partial(self.servers.client.query, token_ids=self.tokens, tenant=self.tenant))

    def _holder(self) -> str:
        held = self._held()
        return max(held, key=lambda name: held[name])

    def _tokens_in(self, ask: Callable[[str], PeerAnswer]) -> dict[str, int]:
        try:
            instances = ask(self.model or "").instances
        except KvsightHttpError as error:
            if error.kind != "urn:kvsight:problem:unknown-model":
                raise
            return {}
        tokens = {name: held.longest_matched for name, held in instances.items()}
        return {name: number for name, number in tokens.items() if number and self.worker in (None, name)}

    def _wait_for(self, fault: Callable[[], BrokenError | None]) -> None:
        """Return once there is no fault. Raises the last one after the longest wait."""
        give_up = time.monotonic() + self.wait_s
        while (found := fault()) is not None:
            if time.monotonic() > give_up:
                raise found
            time.sleep(_POLL_S)

    # --- events -----------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Send the prompt, and note what is added to the topic until its first events arrive."""
        self.arrivals += run_until_interrupted(
            partial(_listen, self.servers.settings, self._send, self._is_awaited, self.wait_s)
        )

    def _is_ours(self, arrival: Arrival) -> bool:
        return (
            self.model in (None, split_group(arrival.model)[0])
            and self.worker in (None, arrival.worker)
            and self.tenant == arrival.tenant
        )

    def _is_awaited(self, arrival: Arrival) -> bool:
        is_of_prompt = arrival.pages_stored > 0 or arrival.degraded_reason.startswith(_WRONG_PAGES)
        return self._is_ours(arrival) and (is_of_prompt or not self.tokens or self._is_known)

    def _judge_arrivals(self) -> None:
        if any(map(self._is_awaited, self.arrivals)):
            return
        topic, within = self.servers.settings.events_topic, f"within {self.wait_s:g} s"
        if any(map(self._is_ours, self.arrivals)):
            text = f"heartbeats of the engine's publisher arrive on topic {topic}, but no event of the prompt {within}"
            remedy = f"let the engine emit KV events{self._if_cached()}; over ZMQ, {_ENGINE_BINDS}; see docs/engines"
            raise BrokenError(text, remedy)
        others = sorted({f"{each.worker} of model {each.model}" for each in self.arrivals})
        if others:
            text = f"no record of {self._subject()} arrived on topic {topic} {within}, only of {names(others)}"
            raise BrokenError(text, "compare the publisher's KVSIGHT_MODEL, KVSIGHT_WORKER and KVSIGHT_TENANT")
        text = f"no record of any worker arrived on topic {topic} {within}"
        remedy = (
            f"start a publisher or a bridge for the engine{self._if_cached()}; compare its KVSIGHT_KAFKA and topics"
        )
        raise BrokenError(text, remedy)

    def _if_cached(self) -> str:
        return f", or give another --prompt: {self._cached_before} tokens were cached" if self._cached_before else ""

    def _subject(self) -> str:
        who = "any worker" if self.worker is None else f"worker {self.worker}"
        return who if self.model is None else f"{who} of model {self.model}"

    def _fault_of_workers(self, before: int) -> BrokenError | None:
        """What keeps the service from showing the events, if anything. before: pages stored before the prompt."""
        workers = self._workers()
        if not workers:
            known = sorted({f"{each.instance_id} of model {each.model_name}" for each in self.servers.client.workers()})
            text = f"the service does not know {self._subject()}; it knows {names(known) or 'none'}"
            return BrokenError(text, f"{self._reading()}, or give the names as the publisher has them")
        if any(_WRONG_PAGES in fault for fault in self._faults()):
            return None  # events arrive; the next check names what is wrong with them
        rows = [row for row in rows_of(workers) if row.cause not in ("", CLOSED) and not row.group]
        is_one_live = any(worker.state == "live" for worker in workers)
        if rows and (self.engine is None or not is_one_live or any(row.endpoint for row in rows)):
            return BrokenError(*_broken(rows[0]), *(BrokenError(*_broken(row)) for row in rows[1:]))
        if not is_one_live:
            texts = [_state(name, listener) for name, listener in _listeners(workers)]
            remedy = "if its publisher was stopped, start it again; see `States of a view` in docs/operations.md"
            return BrokenError(names(texts), remedy)
        if self.tokens and not self._is_known and self._stored() <= before:
            text = "the engine computed the prompt, but the service has applied no event of it"
            return BrokenError(f"{text} within {self.wait_s:g} s", f"{self._reading()}{self._if_cached()}")
        return None

    def _reading(self) -> str:
        if self.servers.settings.kafka is None:
            return "let the engine emit KV events, and register it or run a bridge"
        return "let the service read the same broker and topic: compare KVSIGHT_KAFKA and KVSIGHT_EVENTS_TOPIC"

    # --- clocks -----------------------------------------------------------------------------------------------------

    def _clocks(self) -> Iterator[tuple[str, float | None]]:
        """Yield how far each clock is ahead, in seconds, by the least that is certain."""
        if self.servers.redis_clock is not None:
            yield "Redis", self.servers.redis_clock.theirs - self.servers.redis_clock.ours
        yield "the service", _seconds_ahead(self.servers.service_clock())
        if self.engine is not None:
            yield "the engine", _seconds_ahead(self.engine.date)
        ours = list(filter(self._is_ours, self.arrivals))
        for worker in sorted({arrival.worker for arrival in ours}):
            yield f"publisher {worker}", max(arrival.ahead_s for arrival in ours if arrival.worker == worker)

    # --- pages ------------------------------------------------------------------------------------------------------

    def _page_tokens(self) -> int:
        indexed = {worker.block_size for worker in self._workers()} - {0}
        return self._engine_block_size if self._engine_block_size in indexed else min(indexed)

    def _num_reusable(self) -> int:
        """Pages of the prompt that an engine can reuse: it computes at least one token."""
        return (len(self.tokens) - 1) // self._page_tokens()

    def _matching_seed(self) -> int | None:
        """The known seed with which pages of the prompt are in the index."""
        from kv_events.hashing import sequence_hashes

        for seed in dict.fromkeys((process_seed(), SEED, 0)):
            hashes = sequence_hashes(self.tokens, self._page_tokens(), base=seed)
            if self._tokens_in(partial(self.servers.client.query_by_hash, seq_hashes=hashes, tenant=self.tenant)):
                return seed
        return None

    def _fault_of_hashes(self) -> BrokenError:
        remedy = f"set {SEED_VARIABLE} to the same value in every process"
        seed = self._matching_seed()
        if seed is not None:
            return BrokenError(
                f"the engine's pages are hashed with the seed {seed}, and the service uses another", remedy
            )
        text = "the engine has stored pages, but none has a hash that the service computes for the prompt"
        return BrokenError(text, f"{remedy}; otherwise see `Hashes do not match` in docs/debugging.md")

    def _fault_of_answer(self, reused: int, *, is_reported: bool) -> BrokenError | None:
        indexed = min(max(self._held().values(), default=0) // self._page_tokens(), self._num_reusable())
        if indexed == reused:
            return None
        if indexed < reused:
            verb = "reuses" if is_reported else "computed"
            text = f"the engine {verb} {count(reused, 'page')} of the prompt, the index has {indexed}"
            return BrokenError(text, "look at `counters` and `stale_reason` in GET /workers: see docs/debugging.md")
        text = f"the index has {count(indexed, 'page')} of the prompt, the engine reuses {reused}"
        return BrokenError(text, "let the engine cache prefixes; behind a load balancer, name one engine")


async def _listen(
    settings: IndexerSettings, send: Callable[[], None], is_awaited: Callable[[Arrival], bool], wait_s: float
) -> list[Arrival]:
    """Return what is added to the topic, from before `send` is called until the first awaited batch arrives.

    wait_s: longest wait after `send`. Raises KvsightError, and what `send` raises.
    """
    from api.background import run_in_daemon_thread
    from indexer.sources.kafka import KafkaSource

    source, arrivals = KafkaSource(settings), list[Arrival]()
    try:
        await source.start({})
        ends = await source.ends()
        await source.stop()
        await source.start(ends)
        await run_in_daemon_thread(send)  # Ctrl-C does not wait for the engine
        give_up = time.monotonic() + wait_s
        while time.monotonic() < give_up and not any(map(is_awaited, arrivals)):
            arrivals += _decoded(await source.fetch())
    finally:
        await source.stop()
    return arrivals


def _decoded(records: Sequence[LogRecord]) -> list[Arrival]:
    from kv_events.codec import batch_or_none

    now = time.time()
    return [
        Arrival(*batch.stream[:3], batch.pages().stored.total(), batch.degraded_reason, batch.timestamp - now)
        for batch in (batch_or_none(record.payload) for record in records)
        if batch is not None
    ]


def _listeners(workers: Sequence[Worker]) -> list[tuple[str, Listener]]:
    return [(worker.instance_id, listener) for worker in workers for listener in worker.listeners.values()]


def _state(name: str, listener: Listener) -> str:
    why = f" ({listener.stale_reason})" if listener.stale_reason else ""
    warned = f"; {listener.warning}" if listener.warning else ""
    return f"{name} is {listener.state}{why}, last heard {duration(listener.age_ms)} ago{warned}"


def _broken(row: StreamRow) -> tuple[str, str]:
    """What is wrong with a stream, and what to do about it."""
    text = f"{row.worker} rank {row.dp_rank} is {row.state}, last heard {duration(row.age_ms)} ago"
    said = trouble_text(text if row.is_heard else row.worker, row.endpoint, row.cause, row.since, "")
    return said.rstrip("."), row.remedy or "see `States of a view` in docs/operations.md"


def _either(sizes: Sequence[int]) -> str:
    return f"{' or '.join(map(str, sizes))} tokens" if sizes else "no size"


def _judge_clocks(clocks: Mapping[str, float | None]) -> str:
    """Return what to print if the clocks agree. clocks: name -> seconds ahead; None: it cannot be read.

    Raises BrokenError if one is wrong, which may be this machine's, and SkippedError if none can be read.
    """
    ahead = {name: seconds for name, seconds in clocks.items() if seconds is not None}
    if not ahead:
        raise SkippedError("no other clock can be read")
    wrong = {name: seconds for name, seconds in ahead.items() if abs(seconds) > _MAX_CLOCK_SKEW_S}
    remedy = "synchronise the clocks of all machines, for example with chrony: ages and recordings depend on them"
    if len(wrong) > 1 and len(wrong) == len(ahead) and len({seconds > 0 for seconds in wrong.values()}) == 1:
        seconds = -min(wrong.values(), key=abs)
        raise BrokenError(f"this machine's clock is {_offset(seconds)}, compared with {', '.join(wrong)}", remedy)
    for name, seconds in wrong.items():
        raise BrokenError(f"the clock of {name} is {_offset(seconds)}", remedy)
    return f"{', '.join(ahead)} and this machine differ by less than {_MAX_CLOCK_SKEW_S:g} s"


def _seconds_ahead(clock: ClockReading | None) -> float | None:
    """The least by which the clock of an HTTP server is certainly ahead, or behind: its date has whole seconds."""
    if clock is None:
        return None
    ahead_s = clock.theirs + _DATE_ERROR_S - clock.ours
    return max(0.0, ahead_s - _DATE_ERROR_S) + min(0.0, ahead_s + _DATE_ERROR_S)


def _offset(seconds: float) -> str:
    return f"{abs(seconds):.1f} s {'ahead' if seconds > 0 else 'behind'}"
