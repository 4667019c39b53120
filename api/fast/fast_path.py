"""The fast path: from the bytes of a query to the bytes of its answer in one call.

It takes what nearly all callers send and answers exactly as `api.queries.routes` does. For all other requests it
returns None, and they are passed to FastAPI, which also reports all errors. In a member of a group, the answer to a
query comes later, because the other members are asked. Their requests are answered here, too.
"""

import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any, Generic, NamedTuple, TypeAlias

from api.access.rate_limits import RateLimit, TenantRates
from api.access.tokens import TokenRegistry
from api.fast.heads import Head, HeadReader
from api.fast.kernel_connections import DirectPlan, KernelConnections
from api.fast.kernels.connections import MAX_REQUEST_BYTES
from api.fast.kernels.query import IN_JSON, PACKED, Times
from api.fast.local_answers import LocalAnswers
from api.fast.templates import BodyTemplate, Question, RequestTemplate, TemplateCache
from api.problems import ProblemError
from api.queries.body_formats import JSON, MSGPACK, is_large
from api.queries.parsing import BY_HASH, BY_TOKENS, decode_question
from api.settings import ApiSettings
from api.telemetry.requests import end_request, start_request
from api.telemetry.service_metrics import HttpMetrics
from indexer.consumer import Consumer
from kv_events.http.parsed_query import ParsedQuery
from kv_events.runtime.outages import RateLimitedLogger
from kv_events.runtime.tracing import open_spans

logger = logging.getLogger(__name__)

_RESERVE, _JSON = "/select_and_reserve", "application/json"
_PACKED_TYPES = frozenset({"application/msgpack", "application/x-msgpack"})
_MAX_BODY_BYTES = 2**21  # room for `MAX_TOKENS_OF_TEXT` numbers; more are hashed in another thread


TextAnswer: TypeAlias = Callable[[Any, bytes, int, int], bytes | None]
"""See `TemplateRoute.answer`."""


class GroupAnswers(NamedTuple):
    """How a member of a group answers, by path. An answer that is None: the request must be passed to FastAPI."""

    members: Mapping[str, Callable[[bytes], bytes | None]]
    """Requests of other members: msgpack -> msgpack."""
    queries: Mapping[str, Callable[[bytes, str], Awaitable[bytes | None]]]
    """Queries: body and its media type -> JSON."""


class TemplateRoute(NamedTuple, Generic[Question]):
    """How the requests to one path are answered that have templates."""

    templates: TemplateCache[Question]
    answer: TextAnswer | None
    """Answers a request whose numbers are the JSON text `data[start:end]`, between brackets. Returns None, and has
    changed nothing, if it must be read or answered in another way. Raises ProblemError. None: bodies are decoded.
    """
    direct_plan: Callable[[Question], DirectPlan | None]
    """Returns how kernels answer such requests now, or None if they must not. Raises ProblemError."""


class BodylessRoute(NamedTuple):
    """How requests without a body are answered."""

    line: re.Pattern[bytes]
    """Their first line. Its groups: the name after DELETE, or the name after POST and what follows it."""
    scope: str
    answer: Callable[..., bytes]
    """Gets the groups of the line. Raises ProblemError, and has changed nothing then."""
    direct_plan: Callable[[bytes | None], DirectPlan | None]
    """Gets the last group. Returns how kernels answer such requests, which differ by their names, or None if they must
    not now."""


class FastPath:
    """Answers queries of one application."""

    def __init__(
        self,
        consumer: Consumer,
        settings: ApiSettings,
        tokens: TokenRegistry,
        metrics: HttpMetrics,
        answers: LocalAnswers,
        tenants: TenantRates | None,
        group: GroupAnswers | None,
        selections: Mapping[str, TemplateRoute[Any]],
        bodyless: BodylessRoute | None,
    ) -> None:
        """tenants: bounds on their queries, if any. group: how a member of a group answers. None: `answers` does.

        selections: how those who choose workers are answered, in JSON, by path. bodyless: how requests are answered
        that say how reservations go on.
        """
        self._tenants = tenants
        self._bodyless = bodyless
        fields = {"/query": BY_TOKENS, "/query_by_hash": BY_HASH} if group is None else {}
        self._group = group
        self._spans = open_spans()
        max_body_bytes, with_traces = min(settings.max_body_bytes, _MAX_BODY_BYTES), self._spans is not None
        self.heads = HeadReader(
            [*fields, *selections] if group is None else [*group.members, *group.queries],
            tokens,
            max_body_bytes,
            with_traces=with_traces,
            is_allowed_host=settings.is_allowed_host,
            bodyless=None if bodyless is None else (bodyless.line, bodyless.scope),
        )
        self._consumer = consumer
        self._answers = answers
        self._must_be_ready = not settings.answer_before_ready
        self._metrics = metrics
        self._limited_logger = RateLimitedLogger(logger, "fast path")
        self._headers: list[tuple[bytes, bytes]] = []
        self._encoded_headers = b""
        self._routes: dict[tuple[str, str], TemplateRoute[Any]] = {}
        self._fields = fields
        for path, names in fields.items():
            self._routes[path, _JSON] = TemplateRoute(
                TemplateCache(names, partial(decode_question, body_format=JSON, fields=names)),
                answers.answer_text,
                partial(answers.direct_plan, IN_JSON),
            )
            packed = TemplateCache(names, partial(decode_question, body_format=MSGPACK, fields=names), is_packed=True)
            for content_type in _PACKED_TYPES:
                self._routes[path, content_type] = TemplateRoute(packed, None, partial(answers.direct_plan, PACKED))
        if tenants is None:  # FastAPI counts those of tenants
            self._routes |= {(path, _JSON): route for path, route in selections.items()}
        # each request may be sampled, which the kernels of direct connections cannot decide
        self._can_be_direct = settings.max_body_bytes >= MAX_REQUEST_BYTES and not with_traces
        self.direct = KernelConnections(self._plan, self._times, metrics.queries.note)

    def answer(self, head: Head, data: bytes, start: int) -> bytes | None:
        """Return the answer to the body data[start:], or None if the request must be passed to FastAPI."""
        if self._is_refused(head):
            return None
        began = time.perf_counter()
        # a span that never ends, because the request is passed to FastAPI, is not sent
        span = None if self._spans is None or not head.path else start_request(self._spans, head.path, head.trace)
        try:
            body = self._answer(head, data, start)
        except ProblemError:
            return None
        except Exception as error:  # noqa: BLE001  (FastAPI's route reports it, if it fails as well)
            self._limited_logger.warning("a query is passed to FastAPI: %r", error)
            return None
        if body is not None:
            if head.caller.limit is not None:
                head.caller.limit.note()
            if head.path:
                self._metrics.queries.note(head.path, time.perf_counter() - began)
            if span is not None:
                end_request(span, HTTPStatus.OK)
        return body

    def answer_later(self, head: Head, data: bytes, start: int) -> Awaitable[bytes | None] | None:
        """Return an answer that comes once other members have been asked. None: `answer` decides.

        A query with a limited token is passed to FastAPI, which counts it before it asks.
        """
        ask = None if self._group is None else self._group.queries.get(head.path)
        if ask is None or self._spans is not None or head.caller.limit is not None or self._is_refused(head):
            return None
        return self._gathered(ask(data[start:], head.caller.content_type), head)

    async def _gathered(self, asking: Awaitable[bytes | None], head: Head) -> bytes | None:
        began = time.perf_counter()
        try:
            body = await asking
        except ProblemError:
            return None
        except Exception as error:  # noqa: BLE001  (FastAPI's route reports it, if it fails as well)
            self._limited_logger.warning("a query is passed to FastAPI: %r", error)
            return None
        if body is not None:
            self._metrics.queries.note(head.path, time.perf_counter() - began)
        return body

    def _is_refused(self, head: Head) -> bool:
        if self._must_be_ready and not self._consumer.ready:
            return True
        return head.caller.limit is not None and head.caller.limit.wait_s() > 0

    def _answer(self, head: Head, data: bytes, start: int) -> bytes | None:
        if self._group is not None:
            reply = self._group.members.get(head.path)
            return None if reply is None or head.caller.content_type not in _PACKED_TYPES else reply(data[start:])
        if head.is_of_page and head.path in ("", _RESERVE):
            return None  # FastAPI's middleware judges what pages of other sites ask for
        if not head.path:
            return None if self._bodyless is None else self._bodyless.answer(*head.parameters)
        route = self._routes.get((head.path, head.caller.content_type))
        if route is None:
            return None
        if route.answer is None:
            return self._answer_packed(head, data[start:])
        expected = route.templates.expected(data, start)
        body = None if expected is None else self._answer_template(route.answer, expected, data, start)
        if body is None:
            read = route.templates.read(data, start)
            body = None if read is None or read == expected else self._answer_template(route.answer, read, data, start)
        return body

    def _answer_template(
        self, answer: TextAnswer, template: BodyTemplate[Any], data: bytes, start: int
    ) -> bytes | None:
        question, before, after, _ = template
        rate = self._rate(question)
        if rate is not None and rate.wait_s():
            return None
        answered = answer(question, data, start + len(before), len(data) - len(after))
        if answered is not None and rate is not None:
            rate.note()
        return answered

    def _answer_packed(self, head: Head, body: bytes) -> bytes | None:
        if is_large(body):
            return None
        question, numbers = decode_question(body, MSGPACK, self._fields[head.path])
        if question.is_detailed:
            return None  # the answer is not JSON
        rate = self._rate(question)
        if rate is not None and rate.wait_s():
            return None
        answer = self._answers.answer_one(question, numbers)
        if rate is not None:
            rate.note()
        return answer

    def _rate(self, question: ParsedQuery) -> RateLimit | None:
        """Return the bound on the queries of the tenant, if it has one."""
        if self._tenants is None or not self._answers.knows(question):
            return None
        return self._tenants.rate(question.tenant)

    def request_template(self, head: Head, data: bytes, start: int) -> RequestTemplate | None:
        """Return the template of a request that was answered here. None: its connection cannot be direct."""
        if not self._can_be_direct or head.caller.limit is not None:
            return None
        if not head.path:
            return RequestTemplate.without_body(head, self.heads.generation)
        route = self._routes.get((head.path, head.caller.content_type))
        template = None if route is None else route.templates.read(data, start)
        found = None if template is None else RequestTemplate.of(head, template, self.heads.generation)
        return None if found is None or self._plan(found) is None else found

    def _plan(self, template: RequestTemplate) -> DirectPlan | None:
        """Return how requests of a direct connection are answered now, or None if they must not be."""
        if template.generation != self.heads.generation or (self._must_be_ready and not self._consumer.ready):
            return None
        if not template.path:
            return None if self._bodyless is None else self._bodyless.direct_plan(template.question)
        if self._rate(template.question) is not None:
            return None
        try:
            return self._routes[template.path, template.content_type].direct_plan(template.question)
        except ProblemError:
            return None
        except Exception as error:  # noqa: BLE001  (FastAPI's route reports it, if it fails as well)
            self._limited_logger.warning("queries of direct connections are passed to FastAPI: %r", error)
            return None

    def media_type(self, head: Head) -> bytes:
        """Return the last part of the media type of the answer."""
        return b"msgpack" if self._group is not None and head.path in self._group.members else b"json"

    def _times(self) -> Times:
        return (self._consumer.now(), *self._consumer.freshness.bounds())

    def encoded_headers(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        """Return the server's name and the date as header lines. uvicorn makes a new list of them every second."""
        if headers is not self._headers:
            self._headers = headers
            self._encoded_headers = b"".join(b"%b: %b\r\n" % header for header in headers)
        return self._encoded_headers
