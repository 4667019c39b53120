"""A fleet of simulated workers behind a router that reports its decisions, and that knows why tokens are lost.

The caches, the publishers and the index are real. The fleet plants a cause for each loss: load, a router that does not
ask or asks an index that is behind, other requests between the choice and the arrival, engines that reuse less than
they could, and engines that name their pages otherwise. What is true is read from the caches, never from events.
"""

import random
from collections import Counter
from pathlib import Path

import numpy as np

from analysis.audit.decision_audit import (
    CHOSEN,
    DELIVERED,
    ENGINE,
    EVICTED,
    EVICTED_BEFORE,
    HELD,
    LOAD,
    MISMATCH,
    NEW,
    NO_OUTCOME,
    NO_PAGE,
    NOT_ASKED,
    PREDICTED,
    STALE,
    STORED_SINCE,
)
from indexer.slices import run_at_once
from kv_events.decisions import VERSION, Outcome
from kv_events.hashing import namespace_seed, sequence_hashes
from kv_events.log.event_log import EventLogWriter
from kv_events.records import LogRecord
from kv_events.schema import StorageMedium
from publisher import EventPublisher
from simulation import Request, SimulatedWorker, SimulationSettings
from simulation.run import TimedFleet

PAGE = 4
_NAMES = "another namespace"


def held_tokens(worker: SimulatedWorker, request: Request) -> int:
    """The leading tokens of a prompt that a cache holds. A match would make them its newest pages."""
    resident = {page.sequence_hash for page in worker.cache.iter_resident(StorageMedium.GPU)}
    hashes = sequence_hashes(request.token_ids, PAGE, namespace_seed(cache_salt=request.extra_key)).tolist()
    return PAGE * next((number for number, each in enumerate(hashes) if each not in resident), len(hashes))


class DecidingFleet(TimedFleet):
    """Serves random requests without delay, and keeps the true numbers of the funnel."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._writer = EventLogWriter(folder)
        settings = SimulationSettings(workers=3, capacity_tokens=160, page_size=PAGE)
        self._behind: list[LogRecord] = []
        """Records that the router's index has not applied yet."""
        super().__init__(settings, "round-robin", self._writer)
        self.random = random.Random(seed)
        self.steps: Counter[str] = Counter()
        """Step -> tokens."""
        self.losses: Counter[tuple[str, str]] = Counter()
        """(step, cause) -> tokens."""
        self.gains: Counter[tuple[str, str]] = Counter()
        self._workers, self._router = self.run.workers, self.run.router
        self._prompts = [self._tokens(self.random.randrange(8, 60)) for _ in range(12)]
        self._ever: set[bytes] = set()
        """Prefixes that any worker has ever held, by their tokens."""
        self._number = 0

    def decide(self, num_requests: int) -> None:
        """Serve requests, and close the log."""
        with self._writer:
            for _ in range(num_requests):
                self._tick()
                self._one_request()

    # --- one request ------------------------------------------------------------------------------------------------

    def _one_request(self) -> None:
        dice = self.random
        is_misnamed = dice.random() < 0.1
        request = Request(self._now, self._other_prompt() if is_misnamed else self._prompt())
        engine_request = request._replace(extra_key=_NAMES) if is_misnamed else request
        if dice.random() < 0.7:
            self._catch_up()
        seen = self._router.reusable(request) if dice.random() < 0.85 else None
        loads = [dice.choice([0, 0, 0, 10, 40]) for _ in self._workers]
        scores = [-float(each) for each in loads] if seen is None else [s - w for s, w in zip(seen, loads, strict=True)]
        self._router.compare(scores, seen)
        chosen = max(range(len(scores)), key=scores.__getitem__)
        self._number += 1
        decision = self._router.decision(request, chosen, str(self._number), self._now)
        held = [held_tokens(each, request) for each in self._workers]
        known = self._known_tokens(request)
        self._report(decision)
        self._tick()
        worker = self._workers[chosen]
        stayed = held[chosen]  # tokens that were in the cache all the time
        twin = self._prompt() if is_misnamed else request.token_ids
        for _ in range(dice.choice([0, 0, 0, 1, 6])):  # other requests arrive first
            others = [self._prompt(), twin, *(self._tokens(40) for _ in range(6))]
            self._serve(chosen, Request(self._now, dice.choice(others)))
            stayed = min(stayed, held_tokens(worker, request))
        found = self._serve(chosen, engine_request)
        reused = max(0, found - dice.choice([0, 0, 0, 1, PAGE, 3 * PAGE]))
        named = held_tokens(worker, request)
        self._tick()
        predicted = None if seen is None else seen[chosen]
        self._choice_is_judged(request, held, known, chosen, seen)
        has_outcome = dice.random() < 0.9
        if has_outcome:
            self._report(Outcome(VERSION, str(self._number), self._now, reused))
            self._outcome_is_judged(held[chosen], predicted or 0, seen is None, min(found, stayed), reused, named)
        else:
            self.losses[DELIVERED, NO_OUTCOME] += predicted or 0
        self._absence_is_judged(request, max(held), known, held[chosen], predicted or 0, named, reused * has_outcome)

    def _choice_is_judged(
        self, request: Request, held: list[int], known: int, chosen: int, seen: list[int] | None
    ) -> None:
        best, own = max(held), held[chosen]
        self.steps.update({"prompts": len(request.token_ids), HELD: best, CHOSEN: own})
        best_workers = [number for number, tokens in enumerate(held) if tokens == best]
        if seen is None:
            self.losses[CHOSEN, NOT_ASKED] += best - own
            self.losses[PREDICTED, NOT_ASKED] += own
            return
        sees_more = max(seen[number] for number in best_workers) > seen[chosen]
        self.losses[CHOSEN, LOAD if sees_more else STALE] += best - own
        self.losses[PREDICTED, STALE] += max(0, own - seen[chosen])
        self.gains[PREDICTED, STALE] += max(0, seen[chosen] - own)
        self.steps[PREDICTED] += seen[chosen]

    def _outcome_is_judged(
        self, held: int, predicted: int, is_blind: bool, stayed: int, reused: int, named: int
    ) -> None:
        """stayed: tokens that were in the cache from the choice to the arrival. named: tokens that the worker holds
        under the router's names.
        """
        self.steps[DELIVERED] += reused
        really = max(reused, min(predicted, held))  # what the prediction promised rightly
        self.losses[DELIVERED, STALE] += max(0, predicted - really)
        kept = max(reused, min(really, stayed))
        if reused < predicted:
            self.losses[DELIVERED, EVICTED] += really - kept
            self.losses[DELIVERED, ENGINE] += kept - reused
        held_too = max(predicted, min(held, reused))
        if reused > predicted:
            self.gains[DELIVERED, NOT_ASKED if is_blind else STALE] += held_too - predicted
            by_name = max(held_too, min(reused, named))
            self.gains[DELIVERED, STORED_SINCE] += by_name - held_too
            self.gains[DELIVERED, MISMATCH] += reused - by_name

    def _absence_is_judged(
        self, request: Request, best: int, known: int, held: int, predicted: int, named: int, reused: int
    ) -> None:
        """Token by token: why did no worker hold it?"""
        by_name = max(predicted, min(held, reused), min(reused, named))
        in_pages = len(request.token_ids) // PAGE * PAGE
        for token in range(best, len(request.token_ids)):
            if by_name <= token < reused:
                cause = MISMATCH
            else:
                cause = EVICTED_BEFORE if token < known else NEW if token < in_pages else NO_PAGE
            self.losses[HELD, cause] += 1

    # --- parts ------------------------------------------------------------------------------------------------------

    def _serve(self, worker: int, request: Request) -> int:
        """Let a worker serve a request, and log its events. Returns the tokens that it found in its cache."""
        found = self._workers[worker].serve(request).found_tokens
        if request.extra_key is None:
            for end in range(PAGE, held_tokens(self._workers[worker], request) + 1, PAGE):
                self._ever.add(request.token_ids[:end].tobytes())
        self.deliver(worker)
        return found

    def _known_tokens(self, request: Request) -> int:
        tokens = 0
        while tokens + PAGE <= len(request.token_ids) and request.token_ids[: tokens + PAGE].tobytes() in self._ever:
            tokens += PAGE
        return tokens

    def _tick(self) -> None:
        """Time passes, and heartbeats are sent."""
        self._now += 0.25
        for own in self._publishers:
            self._apply(own[None], force=False)

    def _apply(self, publisher: EventPublisher, *, force: bool) -> None:
        """The router learns it later."""
        for out in publisher.take_records(self._now, force=force):
            record = LogRecord(0, self._writer.next_index, out.timestamp_ms, out.key, out.payload)
            self._writer.append(record)
            self._behind.append(record)

    def _catch_up(self) -> None:
        for record in self._behind:
            run_at_once(self._applier.apply(record, self._now))
        self._behind.clear()
        self._freshness.note_log_read(self._now)

    def _prompt(self) -> np.ndarray:
        """A prompt whose beginning is shared with others."""
        base = self.random.choice(self._prompts)
        return np.concatenate((base[: self.random.randrange(5, len(base) + 1)], self._tokens(self.random.randrange(6))))

    def _other_prompt(self) -> np.ndarray:
        """A prompt that the router names otherwise than the engine. It begins like no other one."""
        base = self._prompts[0]
        return np.concatenate((np.full(PAGE, 7, np.uint32), base))

    def _tokens(self, number: int) -> np.ndarray:
        return np.array([self.random.randrange(1000, 2**32) for _ in range(number)], np.uint32)
