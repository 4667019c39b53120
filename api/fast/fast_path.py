"""The fast path: from the bytes of a query to the bytes of its answer in one call.

It takes what nearly all callers send and answers exactly as `api.queries.routes` does. For all other requests it
returns None, and they are passed to FastAPI, which also reports all errors. In a member of a group, the answer to a
query comes later, because the other members are asked. Their requests are answered here, too.
"""

import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import NamedTuple

from api.access.rate_limits import RateLimit, TenantRates
from api.access.tokens import TokenRegistry
from api.fast.heads import Head, HeadReader
from api.fast.kernel_connections import KernelConnections
from api.fast.kernels.connections import MAX_REQUEST_BYTES
from api.fast.kernels.query import Times
from api.fast.local_answers import LocalAnswers
from api.fast.request_templates import RequestTemplate
from api.fast.templates import BodyTemplate, TemplateCache
from api.fast.writer import Plan
from api.problems import ProblemError
from api.queries.body_formats import format_of
from api.queries.large_bodies import is_large
from api.queries.parsing import BY_HASH, BY_TOKENS, decode_question
from api.settings import ApiSettings
from api.telemetry.requests import end_request, start_request
from api.telemetry.service_metrics import HttpMetrics
from indexer.consumer import Consumer
from kv_events.http.parsed_query import ParsedQuery
from kv_events.runtime.rate_limited_logger import RateLimitedLogger
from kv_events.runtime.tracing import open_spans

logger = logging.getLogger(__name__)

_SELECTING = ("/select", "/select_and_reserve")
_OF_PAGES = re.compile(rb"\n(?:origin|sec-fetch-site)[ \t]*:", re.IGNORECASE)
_PACKED = frozenset({"application/msgpack", "application/x-msgpack"})
_MAX_BODY_BYTES = 2**21  # room for `MAX_TOKENS_OF_TEXT` numbers; more are hashed in another thread


class GroupAnswers(NamedTuple):
    """How a member of a group answers, by path. An answer that is None: the request must be passed to FastAPI."""

    members: Mapping[str, Callable[[bytes], bytes | None]]
    """Requests of other members: msgpack -> msgpack."""
    queries: Mapping[str, Callable[[bytes, str], Awaitable[bytes | None]]]
    """Queries: body and its media type -> JSON."""


class FastPath:
    """Answers queries of one application."""

    def __init__(
        self,
        consumer: Consumer,
        settings: ApiSettings,
        tokens: TokenRegistry,
        metrics: HttpMetrics,
        answers: LocalAnswers,
        tenants: TenantRates | None = None,
        group: GroupAnswers | None = None,
        select: Callable[[str, bytes, int], bytes | None] | None = None,
    ) -> None:
        """tenants: bounds on their queries, if any. group: how a member of a group answers. None: `answers` does.

        select: see `SelectionRoutes.answer`. None: all its requests are passed to FastAPI.
        """
        self._select = select
        self._tenants = tenants
        fields = {"/query": BY_TOKENS, "/query_by_hash": BY_HASH} if group is None else {}
        self._group = group
        self._spans = open_spans()
        max_body_bytes, with_traces = min(settings.max_body_bytes, _MAX_BODY_BYTES), self._spans is not None
        self.heads = HeadReader(
            [*fields, *(_SELECTING if select is not None else ())]
            if group is None
            else [*group.members, *group.queries],
            tokens,
            max_body_bytes,
            with_traces=with_traces,
            is_allowed_host=settings.is_allowed_host,
        )
        self._consumer = consumer
        self._answers = answers
        self._must_be_ready = not settings.answer_before_ready
        self._metrics = metrics
        self._limited_logger = RateLimitedLogger(logger, "fast path")
        self._headers: list[tuple[bytes, bytes]] = []
        self._encoded_headers = b""
        self._templates = {path: TemplateCache(names) for path, names in fields.items()}
        self._fields = fields
        # each request may be sampled, which the kernels of direct connections cannot decide
        can_be_direct = settings.max_body_bytes >= MAX_REQUEST_BYTES and not with_traces
        self.direct = KernelConnections(self._plan, self._times, metrics.queries.record_many) if can_be_direct else None

    def answer(self, head: Head, data: bytes, start: int) -> bytes | None:
        """Return the answer to the body data[start:], or None if the request must be passed to FastAPI."""
        if self._is_refused(head):
            return None
        began = time.perf_counter()
        # a span that never ends, because the request is passed to FastAPI, is not sent
        span = None if self._spans is None else start_request(self._spans, head.path, head.trace)
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
            return None if reply is None or head.caller.content_type not in _PACKED else reply(data[start:])
        if head.path in _SELECTING:
            if head.path != "/select" and _OF_PAGES.search(data, 0, start):
                return None  # FastAPI's middleware judges what pages of other sites ask for
            is_json = head.caller.content_type == "application/json"
            is_fast = self._select is not None and self._tenants is None and is_json
            return self._select(head.path, data, start) if is_fast and self._select else None
        if head.caller.content_type == "application/json":
            return self._answer_json(self._templates[head.path], data, start)
        return self._answer_packed(head, data[start:]) if head.caller.content_type in _PACKED else None

    def _answer_json(self, templates: TemplateCache, data: bytes, start: int) -> bytes | None:
        expected = templates.expected(data, start)
        body = None if expected is None else self._answer_template(expected, data, start)
        if body is None:
            read = templates.read(data, start)
            body = None if read is None or read == expected else self._answer_template(read, data, start)
        return body

    def _answer_template(self, template: BodyTemplate, data: bytes, start: int) -> bytes | None:
        question, before, after = template
        rate = self._rate(question)
        if rate is not None and rate.wait_s():
            return None
        answered = self._answers.answer_text(question, data, start + len(before))
        if answered is None or data[answered[1] :] != after:
            return None
        if rate is not None:
            rate.note()
        return answered[0]

    def _answer_packed(self, head: Head, body: bytes) -> bytes | None:
        if is_large(body):
            return None
        question, numbers = decode_question(body, format_of(head.caller.content_type), self._fields[head.path])
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
        is_plain = head.caller.content_type == "application/json" and head.caller.limit is None
        if not is_plain or head.path not in self._templates:
            return None
        template = self._templates[head.path].read(data, start)
        if template is None or self._rate(template.question) is not None:
            return None
        return RequestTemplate.of(head, template, self.heads.generation)

    def _plan(self, template: RequestTemplate) -> Plan | None:
        """Return how requests of a direct connection are answered now, or None if they must not be."""
        if template.generation != self.heads.generation or (self._must_be_ready and not self._consumer.ready):
            return None
        if self._rate(template.question) is not None:
            return None
        try:
            return self._answers.direct_plan(template.question)
        except ProblemError:
            return None
        except Exception as error:  # noqa: BLE001  (FastAPI's route reports it, if it fails as well)
            self._limited_logger.warning("queries of direct connections are passed to FastAPI: %r", error)
            return None

    def media_type(self, head: Head) -> bytes:
        """Return the last part of the media type of the answer."""
        return b"msgpack" if self._group is not None and head.path in self._group.members else b"json"

    def _times(self) -> Times:
        return (time.time(), *self._consumer.freshness.bounds())

    def encoded_headers(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        """Return the server's name and the date as header lines. uvicorn makes a new list of them every second."""
        if headers is not self._headers:
            self._headers = headers
            self._encoded_headers = b"".join(b"%b: %b\r\n" % header for header in headers)
        return self._encoded_headers
