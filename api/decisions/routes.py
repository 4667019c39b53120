"""POST /decisions: what routers chose, and what the engines reused."""

import asyncio
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import TypeAlias

from msgspec import UNSET
from starlette.responses import Response

from api.problems import ProblemError
from api.queries.body_formats import Body, BodyFormat, Data, decode_as, elements, slimmed
from api.queries.parsing import BY_ANY, decode_question
from api.queries.routes import RawEndpoint, json_response
from indexer.consumer import Consumer
from indexer.writing.queue import NO_LOG, QUEUE_FULL, WriteQueue
from kv_events.decisions import VERSION, Candidate, Decision, DecisionRecord, Outcome, encode_decision
from kv_events.errors import InvalidValueError
from kv_events.hashing import U64Array
from kv_events.http.decisions import (
    MAX_DECISIONS_PER_BATCH,
    DecisionProbe,
    DecisionRequest,
    DecisionsAccepted,
    OutcomeRequest,
)
from kv_events.http.parsed_query import ParsedQuery, PromptArray
from kv_events.limits import MAX_PAGES_PER_DECISION

MAX_BODY_BYTES = 8 * 2**20
_MANY_BYTES = 2**14
"""Larger bodies, which may have hundreds of records, are decoded in another thread."""
_MAX_AGE_S = 86_400.0
_REASONS = {
    NO_LOG: "this service keeps no log, so that decisions only count in the figures of the last hour; start it with "
    "`kvsight serve --record FOLDER`, or with Kafka, to audit them",
    QUEUE_FULL: "the log is slow or away, and the queue of records is full",
}


_Encoded: TypeAlias = tuple[DecisionRecord, bytes]
"""A checked record, and as it is queued."""


class DecisionRoute:
    """The route. A record is checked and queued, never waited for."""

    def __init__(
        self, consumer: Consumer, log: WriteQueue, on_record: Callable[[DecisionRecord], None] = lambda _: None
    ) -> None:
        """on_record: receives each record, also those that the log drops, in the event loop."""
        self._consumer = consumer
        self._log = log
        self._on_record = on_record

    def endpoints(self) -> dict[str, RawEndpoint]:
        """Path -> ASGI application for POST."""
        return {"/decisions": RawEndpoint(self._take, MAX_BODY_BYTES)}

    async def _take(self, body: Body, body_format: BodyFormat) -> Response:
        if len(body) > _MANY_BYTES:
            records = await asyncio.to_thread(self._decode, body, body_format)
        else:
            records = self._decode(body, body_format)
        reasons = list(filter(None, map(self._put, records)))
        reason = _REASONS[reasons[0]] if reasons else ""
        answer = DecisionsAccepted(accepted=len(records) - len(reasons), dropped=len(reasons), reason=reason)
        return json_response(answer, HTTPStatus.ACCEPTED)

    def _put(self, encoded: _Encoded) -> str | None:
        """Return why a record was dropped, or None if it was not."""
        record, payload = encoded
        self._on_record(record)
        return self._log.put(("decision" if isinstance(record, Decision) else "outcome", record.request_id, payload))

    def _decode(self, body: Body, body_format: BodyFormat) -> list[_Encoded]:
        """Return the checked records of a body, encoded here because this may run in a thread.

        Raises ProblemError, after which no record is accepted.
        """
        rest, lists = slimmed(body, body_format)
        probe, now = decode_as(DecisionProbe, rest, body_format), time.time()
        if probe.decisions is UNSET:
            return [self._record(body, body_format, now)]
        given: Sequence[Data] = probe.decisions
        if "decisions" in lists:
            given = elements("decisions", lists["decisions"], body_format, MAX_DECISIONS_PER_BATCH)
        records = []
        for number, data in enumerate(given):
            try:
                records.append(self._record(data, body_format, now))
            except ProblemError as problem:
                raise _inside(f"decisions[{number}].", problem) from None
        return records

    def _record(self, data: Data, body_format: BodyFormat, now: float) -> _Encoded:
        rest, _ = slimmed(data, body_format)
        try:
            if decode_as(DecisionProbe, rest, body_format).cached_tokens is not UNSET:
                outcome = decode_as(OutcomeRequest, rest, body_format)
                time_s = _time(outcome.timestamp, now)
                record: DecisionRecord = Outcome(VERSION, outcome.request_id, time_s, outcome.cached_tokens)
            else:
                record = self._decision(decode_as(DecisionRequest, rest, body_format), data, body_format, now)
            return record, encode_decision(record)
        except InvalidValueError as error:
            raise ProblemError.of_value(error) from None

    def _decision(self, request: DecisionRequest, data: Data, body_format: BodyFormat, now: float) -> Decision:
        question, numbers = decode_question(data, body_format, BY_ANY)
        block_size, hashes = self._pages(question, numbers, request.worker)
        prompt_tokens = len(numbers) if question.field == "token_ids" else len(hashes) * block_size
        return Decision(
            VERSION,
            request.request_id,
            _time(request.timestamp, now),
            question.model,
            question.tenant,
            block_size,
            prompt_tokens if request.prompt_tokens is None else request.prompt_tokens,
            hashes[:MAX_PAGES_PER_DECISION].astype("<u8", copy=False).tobytes(),
            request.worker,
            request.dp_rank,
            request.predicted_tokens,
            tuple(Candidate(each.worker, each.dp_rank, each.tokens, each.score) for each in request.candidates),
        )

    def _pages(self, question: ParsedQuery, numbers: PromptArray, worker: str) -> tuple[int, U64Array]:
        """Return the block size, 0 if it is unknown, and the sequence hashes of the prompt's complete pages."""
        found = self._consumer.namespaces.find(question.model, question.tenant)
        sizes = [each.key.block_size for each in found if any(name == worker for name, _ in tuple(each.by_rank))]
        sizes = sizes or [each.key.block_size for each in found]
        block_size = question.block_size or (sizes[0] if sizes else 0)
        if question.field == "token_ids" and not block_size:
            numbers = numbers[:0]  # nothing to hash them by
        return block_size, question.hashes(numbers, max(1, block_size))


def _time(given: float | None, now: float) -> float:
    if given is None:
        return now
    if not abs(given - now) <= _MAX_AGE_S:
        raise InvalidValueError("timestamp", given, "seconds since 1970, at most a day from now")
    return given


def _inside(prefix: str, problem: ProblemError) -> ProblemError:
    field = None if problem.field is None else prefix + problem.field
    return ProblemError(problem.status, problem.kind, prefix + problem.detail, field, problem.value)
