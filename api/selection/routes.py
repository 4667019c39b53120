"""Routes that choose a worker, in the dialect of Dynamo 1.6.1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import attrgetter

import msgspec
import numpy as np
from msgspec import UNSET
from starlette.responses import Response

from api.access.rate_limits import TenantRates
from api.fast.fast_path import TemplateRoute
from api.fast.kernels.query import JSON_TOKENS
from api.fast.templates import TemplateCache
from api.fast.writer import AnswerWriter, GivenPrompt, prompt_of
from api.problems import ProblemError, ProblemKind
from api.prompts.renderer import PromptRenderer
from api.queries.body_formats import JSON, Body, BodyFormat, decode_as
from api.queries.routes import Handler, RawEndpoint, check_connected, json_response
from api.queries.text import has_text
from api.selection.answers import loads_of, overlaps_of, selection_of
from api.selection.direct import SelectionPlan, direct_table, session_text
from api.selection.kernels.record import NUM_RECORDS
from api.selection.requests import decoded, decoded_text, question_of, rendered_prompt
from api.selection.reservations import Reservations, check_id
from api.view_source import ViewSource
from indexer.namespaces import Namespace
from kv_events.http.selection import Selection, SelectRequest
from kv_events.limits import MAX_REQUEST_ID_BYTES
from selection.exchange import ReservationExchange
from selection.roster import Directory, Found, Rosters, Weighed
from selection.selector import NoCandidateError, Selector, session_of
from selection.settings import SelectionSettings

_RESERVE = "/select_and_reserve"
_unknown_to_kernels = attrgetter("isl_tokens", "pinned_worker", "affinity_target")
"""Returns the fields of a request that kernels do not know."""


class SelectionRoutes:
    """The routes. All run in the event loop of the consumer, so a choice and its booking are one step."""

    def __init__(
        self,
        served: ViewSource,
        settings: SelectionSettings,
        directory: Directory,
        exchange: ReservationExchange,
        renderer: PromptRenderer,
        tenants: TenantRates | None,
        check_ready: Callable[[], None],
        max_body_bytes: int,
    ) -> None:
        """exchange: has the book, and gets each record after it was applied. tenants: bounds on their requests, if any.

        check_ready: raises ProblemError (503) if no worker may be chosen yet.
        """
        rosters = Rosters(exchange.book, directory)
        self.exchange = exchange
        self.reservations = Reservations(served, rosters, exchange, check_ready, max_body_bytes)
        self._served = served
        self._selector = Selector(rosters, settings.policy, exchange.replica, exchange.book)
        self._renderer = renderer
        self._tenants = tenants
        self._max_body_bytes = max_body_bytes
        self._writer = AnswerWriter()

    def endpoints(self) -> dict[str, RawEndpoint]:
        """Path -> ASGI application for POST."""
        handlers: dict[str, Handler] = {
            "/select": partial(self._select, is_reserving=False),
            _RESERVE: partial(self._select, is_reserving=True),
            "/potential_loads": self._potential_loads,
            "/overlap_scores": self._overlap_scores,
        }
        own = {path: RawEndpoint(handler, self._max_body_bytes) for path, handler in handlers.items()}
        return own | self.reservations.endpoints()

    def text_routes(self) -> dict[str, TemplateRoute[SelectRequest]]:
        """Path -> how JSON bodies with tokens are answered."""
        templates = TemplateCache(("token_ids",), _decoded_text)
        return {
            path: TemplateRoute(
                templates,
                partial(self._answer, is_reserving=is_reserving),
                partial(self._plan, is_reserving=is_reserving),
            )
            for path, is_reserving in (("/select", False), (_RESERVE, True))
        }

    def _answer(self, request: SelectRequest, text: bytes, start: int, end: int, *, is_reserving: bool) -> bytes | None:
        namespace, question = self._namespace(request), question_of(request, "token_ids")
        prompt = GivenPrompt(JSON_TOKENS, text, start, end)
        found = self._writer.find(question, prompt, namespace, self._served.freshness)
        if found is None:
            return None
        if request.isl_tokens is not None:
            found = found._replace(tokens=request.isl_tokens)
        return msgspec.json.encode(self._placed(request, found, namespace, is_reserving=is_reserving))

    def _plan(self, request: SelectRequest, *, is_reserving: bool) -> SelectionPlan | None:
        is_plain = _unknown_to_kernels(request) == (None, None, None)
        session = session_of(request)  # a longer one would have no room in a record
        is_plain = is_plain and (is_reserving or request.selection_id is None)  # `/reservations` may follow
        if not is_plain or request.sources or len(session.encode()) > MAX_REQUEST_ID_BYTES:
            return None
        namespace, now, selector = self._namespace(request), self._served.now(), self._selector
        work = selector.work(request, namespace, now)
        if is_reserving and work is not None and not work[0].is_numbered:
            self.reservations.number(work[0].ranks)
            work = selector.work(request, namespace, now)
        if work is None or (is_reserving and not work[0].is_numbered):
            return None
        roster, scale = work
        kind, book = (is_reserving, request.explain), self.reservations.book
        if kind not in roster.kept:
            books = selector if is_reserving else None
            roster.kept[kind] = direct_table(roster, book, namespace, books, is_explained=request.explain)
        table, choices, answer_bytes = roster.kept[kind]
        found = self._writer.plan(question_of(request, "token_ids"), namespace)

        def note() -> None:
            if not request.selection_id:
                selector.num_named += choices.made.item(NUM_RECORDS)
            self.reservations.note(choices, roster.ranks, now)

        moments, first_name = (now, book.held_until(now), book.ttl_s), selector.num_named + 1
        allowed = None
        if request.allowed_worker_ids is not None:
            given = set(map(str, request.allowed_worker_ids))
            allowed = np.array([rank.worker in given for rank in roster.ranks], np.bool_)
        choice = scale, table, choices, answer_bytes, first_name, moments
        return SelectionPlan(found, *choice, session_text(session), roster.columns.is_allowed, allowed, note)

    async def _select(self, body: Body, body_format: BodyFormat, *, is_reserving: bool) -> Response:
        request, namespace, found = await self._asked(body, body_format)
        return json_response(self._placed(request, found, namespace, is_reserving=is_reserving))

    def _placed(self, request: SelectRequest, found: Found, namespace: Namespace, *, is_reserving: bool) -> Selection:
        now, name = self._served.now(), request.selection_id
        if name is not None:
            check_id(name)
            if is_reserving:
                self.reservations.check_new(name)
        try:
            chosen = self._selector.choose(request, namespace, self._served.freshness, found, now)
        except NoCandidateError as error:
            raise _unavailable(str(error)) from None
        if not is_reserving and name is None:
            return selection_of(request, chosen, namespace, None)
        records = self._selector.records(request, chosen, namespace, now)
        answer = selection_of(request, chosen, namespace, records[0] if is_reserving else None)
        if is_reserving:
            self.reservations.add(records, now)
        else:
            self.reservations.keep_pending(records, now)
        return answer

    async def _potential_loads(self, body: Body, body_format: BodyFormat) -> Response:
        _, namespace, found = await self._asked(body, body_format)
        roster, rows, candidates = self._weighed(namespace, found)
        is_cut = found.tokens % namespace.key.block_size > 0  # an incomplete page does not count here
        blocks = candidates.decode_blocks - is_cut
        columns = candidates.computed + candidates.prefill_tokens, blocks, candidates.requests
        return json_response(loads_of(roster, rows, *columns))

    async def _overlap_scores(self, body: Body, body_format: BodyFormat) -> Response:
        _, namespace, found = await self._asked(body, body_format)
        return json_response(overlaps_of(self._weighed(namespace, found), len(found.hashes), namespace.key.block_size))

    async def _asked(self, body: Body, body_format: BodyFormat) -> tuple[SelectRequest, Namespace, Found]:
        if await self.reservations.in_thread(body, has_text, body, body_format):
            request, given = await self.reservations.in_thread(body, decoded_text, body, body_format)
            self._admit(request)  # before an engine is asked
            prompt = await rendered_prompt(request, given, self._renderer)
            await check_connected()  # nobody would release what is booked
        else:
            request, prompt = await self.reservations.in_thread(body, decoded, SelectRequest, body, body_format)
            self._admit(request)
        namespace, question, numbers = self._namespace(request), prompt.question, prompt.numbers
        if question.media:
            hashes = question.hashes(numbers, namespace.key.block_size)
            question, prompt = replace(question, field="seq_hashes", media=()), prompt._replace(tokens=len(numbers))
            numbers = hashes
        found = self._writer.find(question, prompt_of(question, numbers), namespace, self._served.freshness)
        assert found is not None, "only texts may be unreadable"
        tokens = found.tokens if prompt.tokens is None else prompt.tokens
        hashes = found.hashes if prompt.booked is None else prompt.booked
        return request, namespace, found._replace(hashes=hashes, tokens=tokens, degraded=prompt.degraded)

    def _admit(self, request: SelectRequest) -> None:
        """Check that there are workers of the model, and count the request for its tenant. Raises ProblemError."""
        self._namespace(request)
        if self._tenants is not None:
            self._tenants.admit(question_of(request, "token_ids"))

    def _weighed(self, namespace: Namespace, found: Found) -> Weighed:
        if found.degraded:
            raise _unavailable(found.degraded)
        try:
            return self._selector.weigh(namespace, self._served.freshness, found, self._served.now())
        except NoCandidateError as error:
            raise _unavailable(str(error)) from None

    def _namespace(self, request: SelectRequest) -> Namespace:
        return self.reservations.namespace(request.model_name, request.routing_group)


def _decoded_text(body: bytes) -> tuple[SelectRequest, list[int]]:
    """Decode a body. The list is empty if it is not the prompt, or not all of it."""
    request = decode_as(SelectRequest, body, JSON)
    if request.token_ids is UNSET or request.sequence_hashes is not UNSET or request.media:
        return request, []
    return request, request.token_ids


def _unavailable(detail: str) -> ProblemError:
    return ProblemError(503, ProblemKind.UNAVAILABLE, detail, retry_after_s=1)
