"""Routes of reservations, from booking to release, and of loads."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from api.access.guard import scope_of
from api.fast.fast_path import BodylessRoute
from api.fast.kernels.recognise import NAME_IN_LINE
from api.openapi import answers, problem
from api.problems import ProblemError, ProblemKind
from api.queries.body_formats import Body, BodyFormat, LargeBodies, decode_as, format_of
from api.queries.routes import RawEndpoint, json_response, read_body
from api.selection.answers import load_of, loads_of, worker_name
from api.selection.direct import StepPlan, direct_steps
from api.selection.kernels.record import NAME_HEAD_BYTES, BookedChoices
from api.selection.requests import Prompt, decoded
from api.view_source import ViewSource
from indexer.namespaces import Namespace
from kv_events.decisions import VERSION, Choices, Decision, check_text
from kv_events.errors import InvalidValueError
from kv_events.http.selection import Done, ModelLoads, OutputBlock, Reservation, ReserveRequest
from kv_events.limits import MAX_OUTPUT_BLOCKS, MAX_PAGES_PER_DECISION, MAX_REQUEST_ID_BYTES
from kv_events.reservations import (
    AT_PREFILL,
    OUTPUT_BLOCK,
    PREFILL_COMPLETE,
    RELEASED,
    Progressed,
    Reserved,
    record_openings,
)
from kv_events.streams import StreamId
from selection.book import BookFullError
from selection.exchange import ReservationExchange
from selection.roster import Rosters

_PENDING_S, _MAX_PENDING, _MAX_PENDING_PAGES = 120.0, 4096, 2**22
_PAGE_BYTES = 8
_MAX_STEP_BYTES = 1024
_STEP = re.compile(
    rb"(?:DELETE /reservations/%b|POST /reservations/%b/(prefill_complete|output_block)) HTTP/1\.1\r\n"
    % (NAME_IN_LINE, NAME_IN_LINE)
)
"""First line of a request that says how a reservation goes on. Ids with other characters are left to FastAPI."""
_DONE = msgspec.json.encode(Done())
_DOTS = (".", "..")


class Reservations:
    """What is reserved, and what callers of `POST /select` may still reserve."""

    def __init__(
        self,
        served: ViewSource,
        rosters: Rosters,
        exchange: ReservationExchange,
        check_ready: Callable[[], None],
        max_body_bytes: int,
    ) -> None:
        """exchange: gets each record after it was applied to its book.

        check_ready: raises ProblemError (503) if no worker may be chosen yet.
        """
        self._served = served
        self._exchange = exchange
        self.book = exchange.book
        self._rosters = rosters
        self._check_log = check_ready
        self._max_body_bytes = max_body_bytes
        self.in_thread = LargeBodies().in_thread
        """For bodies of the selection service."""
        self._steps = direct_steps(exchange.replica, _DONE)
        self._name_at = len(record_openings(exchange.replica)[0]) + NAME_HEAD_BYTES
        self._pending_pages = 0
        self._pending: OrderedDict[tuple[str, str, str], tuple[float, list[Reserved]]] = OrderedDict()

    def namespace(self, model: str, tenant: str) -> Namespace:
        """Return the namespace of a model. Raises ProblemError (503, 409)."""
        self._check_ready()
        self._check_log()
        found = self._served.namespaces.find(model, tenant)
        if not found:
            detail = f"no schedulable workers for model={model} routing_group={tenant}"
            raise ProblemError(503, ProblemKind.UNAVAILABLE, detail, "model_name", model, retry_after_s=1)
        if len(found) > 1:
            sizes = " and ".join(str(each.key.block_size) for each in found)
            detail = f"workers of model={model} routing_group={tenant} use block sizes {sizes}, expected one"
            raise ProblemError(HTTPStatus.CONFLICT, ProblemKind.BLOCK_SIZE, detail)
        return found[0]

    def _check_ready(self) -> None:
        if why := self._exchange.why_not_ready():
            raise ProblemError(503, ProblemKind.UNAVAILABLE, why, retry_after_s=1)

    def check_new(self, reservation_id: str) -> None:
        """Check that an id is not in use. Raises ProblemError (409)."""
        self.book.expire(self._served.now())
        if reservation_id in self.book:
            detail = f"selection {reservation_id} is already reserved or being reserved"
            raise ProblemError(409, ProblemKind.ALREADY_RESERVED, detail, "selection_id", reservation_id)

    def add(self, records: Sequence[Reserved], now: float) -> None:
        """Book the reservations of a request, and send them to other replicas. Raises ProblemError (409, 422, 503)."""
        check_id(records[0].decision.request_id)
        for record in records:
            self.check_new(record.decision.request_id)
        try:
            check_text("selection_id", records[-1].decision.request_id, MAX_REQUEST_ID_BYTES)
            check_text("session_id", records[0].session or "-", MAX_REQUEST_ID_BYTES)
        except InvalidValueError as error:
            raise ProblemError.of_value(error) from None
        for record in records:
            try:
                self.book.apply(record, now)
            except BookFullError as error:  # what is booked of the request expires
                raise ProblemError(503, ProblemKind.OVERLOADED, str(error), retry_after_s=1) from None
            self._exchange.put(record)

    def number(self, ranks: Sequence[StreamId]) -> None:
        """Give ranks a place in the book, as long as there is room."""
        with suppress(BookFullError):
            for rank in ranks:
                self.book.number(rank)

    def note(self, choices: BookedChoices, ranks: Sequence[StreamId], now: float) -> None:
        """Send what a kernel has booked to other replicas. ranks: those of the roster."""
        count, _, num_bytes, num_lost, tokens, best, held = choices.made.tolist()
        lost = [(ranks[row].worker, *numbers) for row, *numbers in choices.lost[:num_lost].tolist()]
        records, ends = choices.records[:num_bytes].tobytes(), choices.ends[:count].tolist()
        self._exchange.put_choices(Choices(now, (count, tokens, best, held), lost, records, ends, self._name_at))

    def keep_pending(self, records: list[Reserved], now: float) -> None:
        """Keep a choice for the caller, who may reserve it within two minutes."""
        decision = records[0].decision
        key = decision.model, decision.tenant, decision.request_id
        self._forget_pending(key)
        self._pending[key] = now + _PENDING_S, records
        self._pending_pages += len(decision.sequence_hashes) // _PAGE_BYTES
        while (first := next(iter(self._pending))) and (
            len(self._pending) > _MAX_PENDING
            or self._pending_pages > _MAX_PENDING_PAGES
            or self._pending[first][0] <= now
        ):
            self._forget_pending(first)

    def _forget_pending(self, key: tuple[str, str, str]) -> None:
        _, records = self._pending.pop(key, (0.0, []))
        for record in records[:1]:
            self._pending_pages -= len(record.decision.sequence_hashes) // _PAGE_BYTES

    def endpoints(self) -> dict[str, RawEndpoint]:
        """Path -> ASGI application for POST."""
        return {"/reservations": RawEndpoint(self._reserve, self._max_body_bytes)}

    async def _reserve(self, body: Body, body_format: BodyFormat) -> Response:
        request, prompt = await self.in_thread(body, decoded, ReserveRequest, body, body_format)
        now, namespace = self._served.now(), self.namespace(request.model_name, request.routing_group)
        is_pending = request.worker_id is None
        records = self._taken(request, now) if is_pending else [self._explicit(request, prompt, namespace, now)]
        self.add(records, now)
        decision = records[0].decision
        if is_pending:
            self._forget_pending((decision.model, decision.tenant, decision.request_id))
        roster = self._rosters.of(namespace, now)
        rows = roster.rows.get(decision.worker)
        answer = Reservation(
            selection_id=decision.request_id,
            model_name=decision.model,
            routing_group=decision.tenant,
            worker_id=worker_name(decision.worker),
            dp_rank=decision.dp_rank or 0,
            endpoint=roster.endpoints[rows[0]] if rows else None,
        )
        return json_response(answer, HTTPStatus.CREATED)

    def _taken(self, request: ReserveRequest, now: float) -> list[Reserved]:
        """Return the reservations of an earlier selection. Raises ProblemError (404)."""
        key = request.model_name, request.routing_group, request.selection_id
        expires, records = self._pending.get(key, (0.0, []))
        if expires <= now:
            scope = f"model={request.model_name} routing_group={request.routing_group}"
            why = "expired, already used, or never selected"
            raise _unknown(f"no pending selection {request.selection_id} for {scope} ({why})", request.selection_id)
        change = msgspec.structs.replace
        return [change(record, decision=change(record.decision, timestamp=now)) for record in records]

    def _explicit(self, request: ReserveRequest, prompt: Prompt, namespace: Namespace, now: float) -> Reserved:
        """Return a reservation of what the caller chose. Raises ProblemError."""
        worker, roster, key = str(request.worker_id), self._rosters.of(namespace, now), namespace.key
        ranks = [roster.ranks[row].dp_rank for row in roster.rows.get(worker, ())]
        scope = f"model={key.model} routing_group={key.tenant}"
        if not ranks:
            raise _unknown(f"schedulable worker {worker} not found for {scope}", worker)
        rank = min(ranks) if request.dp_rank is None else request.dp_rank
        if rank not in ranks:
            raise _unknown(f"worker {worker} has no dp_rank {rank} for {scope}; it has {ranks}", rank)
        hashes = prompt.booked
        if hashes is None:
            hashes = prompt.question.hashes(prompt.numbers, key.block_size)
        tokens = len(hashes) * key.block_size if prompt.tokens is None else prompt.tokens
        pages = hashes[:MAX_PAGES_PER_DECISION].astype("<u8", copy=False).tobytes()
        decision = Decision(VERSION, request.selection_id, now, *key, tokens, pages, worker, rank, None, ())
        return Reserved(
            VERSION, self._exchange.replica, decision, request.effective_prefill_tokens, request.session_id or ""
        )

    def bodyless_route(self) -> BodylessRoute:
        """Return how steps without a body are answered in the fast path, as the routes of `router` do."""
        return BodylessRoute(_STEP, scope_of("DELETE", "/reservations/x"), self._answer_step, self._plan_steps)

    def _answer_step(self, released: bytes | None, going_on: bytes | None, step: bytes | None) -> bytes:
        self._progress((released or going_on or b"").decode(), _step_of(step))
        return _DONE

    def _plan_steps(self, step: bytes | None) -> StepPlan | None:
        if self._exchange.why_not_ready():
            return None  # FastAPI's route reports it
        return StepPlan(self.book, *self._steps, _step_of(step), self._served.now(), self._exchange.put_joined)

    def router(self) -> APIRouter:
        """Return the routes whose paths have parameters."""
        router = APIRouter(tags=["selection"])
        done = {**answers(Done, "Noted"), **problem(404, "No such reservation")}

        @router.post("/reservations/{reservation_id:path}/prefill_complete", response_class=Response, responses=done)
        async def prefill_complete(reservation_id: str) -> Response:
            """Note that the prefill of a request is complete, because its first token has come."""
            return self._progressed(reservation_id, PREFILL_COMPLETE)

        @router.post("/reservations/{reservation_id:path}/output_block", response_class=Response, responses=done)
        async def output_block(reservation_id: str, request: Request) -> Response:
            """Note that a request has filled another page. The body may be `{"decay_fraction": 0.5}`."""
            given = OutputBlock()
            body = await read_body(request, _MAX_STEP_BYTES)
            if body:
                given = decode_as(OutputBlock, body, format_of(request.headers.get("content-type")))
            if given.decay_fraction is not None and not 0 <= given.decay_fraction <= 1:
                fault = InvalidValueError("decay_fraction", given.decay_fraction, "a number in 0.0 .. 1.0")
                raise ProblemError.of_value(fault, HTTPStatus.BAD_REQUEST)
            return self._progressed(reservation_id, OUTPUT_BLOCK, given.decay_fraction)

        @router.delete("/reservations/{reservation_id:path}", response_class=Response, responses=done)
        async def release(reservation_id: str) -> Response:
            """Release the reservation of a request that has ended."""
            return self._progressed(reservation_id, RELEASED)

        @router.get("/loads", response_class=Response, responses=answers(list[ModelLoads], "By model"))
        async def loads(model_name: str | None = None, routing_group: str | None = None) -> Response:
            """Return what is booked on each rank, and what its engine reports, if it does."""
            found = [
                self._loads(namespace)
                for namespace in self._served.namespaces
                if model_name in (None, namespace.key.model)
                and routing_group in (None, namespace.key.tenant)
                and not self._served.namespaces.is_group(namespace)
            ]
            return json_response(found)

        return router

    def _loads(self, namespace: Namespace) -> ModelLoads:
        now, (model, tenant, _) = self._served.now(), namespace.key
        self._exchange.expire(now)
        roster = self._rosters.of(namespace, now)
        places = roster.columns.places
        columns = [np.where(places >= 0, each[places], 0) for each in self.book.columns.loads]
        loads = loads_of(roster, range(len(places)), *columns)
        others = {view.stream for view in namespace.views.values()}.difference(roster.ranks)  # such as draining ones
        loads += [load_of(rank, self.book.booked(rank)) for rank in sorted(others)]
        return ModelLoads(model_name=model, routing_group=tenant, loads=loads)

    def _progressed(self, reservation_id: str, step: str, decay_fraction: float | None = None) -> Response:
        self._progress(reservation_id, step, decay_fraction)
        return json_response(Done())

    def _progress(self, reservation_id: str, step: str, decay_fraction: float | None = None) -> None:
        """Note how a reservation goes on. Raises ProblemError (404, 503), and has changed nothing then."""
        self._check_ready()
        records = self._apply(reservation_id, step, self._served.now(), decay_fraction)
        if not records:
            raise _unknown(f"reservation {reservation_id} not found", reservation_id)
        self._exchange.put(*records)

    def _apply(
        self, reservation_id: str, step: str, now: float, decay_fraction: float | None = None
    ) -> list[Progressed]:
        """Note how a reservation goes on. Returns the records of what has changed: none if it is unknown."""
        blocks = min(self.book.output_blocks(reservation_id) + 1, MAX_OUTPUT_BLOCKS) if step == OUTPUT_BLOCK else 0
        record = Progressed(VERSION, self._exchange.replica, reservation_id, now, step, decay_fraction, blocks)
        if not self.book.apply(record, now):
            return []
        at_prefill, records = reservation_id + AT_PREFILL, [record]
        if step in (PREFILL_COMPLETE, RELEASED) and at_prefill in self.book:
            records += self._apply(at_prefill, RELEASED, now)
        return records


def check_id(selection_id: str) -> None:
    """Check that paths can name a reservation, which is not the prefill of another one. Raises ProblemError."""
    if "\n" in selection_id or selection_id in _DOTS or selection_id.endswith(AT_PREFILL):
        expected = f"a text without line feeds that is not . or .. and does not end with {AT_PREFILL}"
        raise ProblemError.of_value(InvalidValueError("selection_id", selection_id, expected))


def _step_of(text: bytes | None) -> str:
    """Return the step that a request names. None: it releases the reservation."""
    return RELEASED if text is None else text.decode()


def _unknown(detail: str, value: str | int) -> ProblemError:
    return ProblemError(404, ProblemKind.UNKNOWN_RESERVATION, detail, None, value)
