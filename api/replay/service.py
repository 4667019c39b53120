"""The replay of a log as a service: each request is answered as of the moment that its parameter `at` names."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from fastapi import APIRouter
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.access.guard import OPEN_PATHS
from api.fast.local_answers import LocalAnswers
from api.page.state import PageState
from api.page.worker_history import WorkerHistory
from api.problems import ProblemError, ProblemKind
from api.queries.explain import ExplainRoute
from api.queries.routes import QueryRoutes, read_body
from api.replay.markers import MarkerSearch
from api.replay.moments import DecisionHistory, History, OpenMoment, OpenMoments, RateHistory
from api.replay.routes import AT_TEXT, past_routes
from api.service import Endpoint, Service
from api.settings import ApiSettings
from api.telemetry.service_metrics import ViewMetrics, metrics_text
from api.workers.routes import worker_routes
from indexer.applier import Applier
from indexer.freshness import Freshness
from indexer.namespaces import Namespaces
from indexer.replay import Timeline
from indexer.views import View
from kv_events.log.moments import LogMoment
from kv_events.streams import StreamId
from selection.book import Booked
from selection.past import PastBook
from selection.settings import SelectionSettings

_present: ContextVar[OpenMoment] = ContextVar("moment")
_PATHS = frozenset(
    {
        *("/query", "/query_by_hash", "/query/batch", "/explain"),
        *("/workers", "/dump", "/metrics", "/fleet", "/residency", "/funnel"),
    }
)

_MOST_PARAMETERS = 100
_WRITING = (
    "/register",
    "/unregister",
    "/decisions",
    "/workers/{worker:path}/resync",
    "/select_and_reserve",
    "/reservations",
    "/reservations/{reservation_id:path}",
)
"""Paths of the live service that change something."""


def present_moment() -> OpenMoment:
    """Return the moment of the request that the calling task answers."""
    return _present.get()


def shows_moment(path: str) -> bool:
    """Return whether a path is answered as of the moment in its parameter `at`."""
    return path in _PATHS or path.startswith("/workers/")


class MomentMiddleware:
    """Middleware that answers some paths as of a moment, which stays in memory until the answer is sent.

    Bodies are read before, so that clients that send them slowly hold no moment.
    """

    def __init__(self, app: ASGIApp, moments: OpenMoments, max_body_bytes: int) -> None:
        self._app = app
        self._moments = moments
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not (scope["type"] == "http" and shows_moment(scope["path"])):
            await self._app(scope, receive, send)
            return
        try:
            moment = await self._moments.parse(asked_moment(scope))
            if scope["method"] == "POST":
                receive = await _received(Request(scope, receive), self._max_body_bytes)
            async with self._moments.opened(moment) as opened:
                _present.set(opened)
                await self._app(scope, receive, send)
        except ProblemError as problem:
            await problem.response()(scope, receive, send)
        except ClientDisconnect:
            return


async def _received(request: Request, limit: int) -> Receive:
    """Read the body of a request. Returns what gives it again. Raises ProblemError and ClientDisconnect."""
    messages: list[Message] = [{"type": "http.request", "body": await read_body(request, limit), "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await request.receive()

    return receive_again


def asked_moment(scope: Scope) -> str | None:
    """Return the parameter `at` of a request. Raises ProblemError if there are several, or too many parameters."""
    try:
        given = parse_qsl(
            scope["query_string"].decode("latin-1"), keep_blank_values=True, max_num_fields=_MOST_PARAMETERS
        )
    except ValueError:
        detail = f"a request has at most {_MOST_PARAMETERS} parameters"
        raise ProblemError(422, ProblemKind.INVALID_VALUE, detail) from None
    found = [value for name, value in given if name == "at"]
    if len(found) > 1:
        raise ProblemError(422, ProblemKind.INVALID_VALUE, "at: given more than once", "at")
    return found[0] if found else None


class ReplayViews:
    """The views as of the moment of the request. See `api.view_source.ViewSource`."""

    ready = True

    @property
    def namespaces(self) -> Namespaces:
        return present_moment().views.namespaces

    @property
    def freshness(self) -> Freshness:
        return present_moment().views.freshness

    @property
    def applier(self) -> Applier:
        return present_moment().views.applier

    def why_not_ready(self) -> str:
        return ""  # everything that belongs to a moment has been applied

    def reason(self, view: View) -> str:
        return self.freshness.reason(view)

    def now(self) -> float:
        return present_moment().views.now


class ReplayService(Service):
    """The past: a log at any moment."""

    open_paths = OPEN_PATHS - {"/metrics"}
    """The metrics are those of a moment, which has to be opened."""

    def __init__(
        self,
        folder: Path,
        settings: ApiSettings,
        default: LogMoment,
        damage: list[str],
        selection: SelectionSettings | None = None,
    ) -> None:
        """folder: of the log. default: the moment of requests that name none; `LogMoment()`: the end of the log.

        damage: what of the log is known to be unusable. selection: settings of the service then. Raises EventLogError,
        OutsideTheLogError or OSError.
        """
        super().__init__(ReplayViews(), settings)
        self._moments = OpenMoments(folder, default)
        self._marks = MarkerSearch(folder, self._moments.extent.first_index)
        self._rates = RateHistory()
        self._decisions = DecisionHistory(folder)
        self._book = PastBook(folder, selection)
        explain = ExplainRoute(folder, settings.explain_timeout_s, lambda: present_moment().moment)
        queries = QueryRoutes(LocalAnswers(self.views), lambda: None, settings.max_body_bytes)
        self.endpoints: dict[str, Endpoint] = {**queries.endpoints(), **explain.endpoints()}
        past = past_routes(self._moments, self._marks, folder.name, damage)
        self.routers = [worker_routes(self.views), past, _refusing_routes()]
        self.middleware = [Middleware(MomentMiddleware, moments=self._moments, max_body_bytes=settings.max_body_bytes)]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self._marks.running(self._moments.extent.next_index), self.tokens.following(lambda: None):
            yield

    async def page_state(self, at: str | None) -> PageState:
        opened = present_moment()
        index, now = opened.views.index, opened.views.now

        def history(timeline: Timeline) -> History:
            return opened.history or (
                self._rates.rates(timeline, now),
                self._decisions.funnel(timeline, index, now),
                self._book.at(timeline, opened.moment, opened.views).all_booked(),
            )

        if opened.history is None:
            opened.history = await self._moments.work(history)
        rates, funnel, booked = opened.history
        return PageState(
            key=f"{opened.moment.text} {self._moments.extent.next_index} {self._marks.next_index}",
            is_past=True,
            can_forget_expired=False,
            views=self.views,
            is_resync_requested=lambda _view: False,
            next_step="the log has none at this moment",
            engines={},
            capacity=_no_capacity,
            booked=lambda stream: booked.get(stream, Booked()),
            watch=WorkerHistory.of_past(rates, self._marks.changes_before(index)),
            funnel=lambda _now, _range_s: funnel,
        )

    async def metrics(self) -> bytes:
        return await metrics_text(ViewMetrics(self.views, self.settings.metrics_max_workers, _no_capacity))

    def amend_document(self, document: dict[str, Any]) -> None:
        for path in _WRITING:
            document["paths"].pop(path, None)
        document["paths"]["/metrics"]["get"].pop("security", None)
        at = {"name": "at", "in": "query", "schema": {"type": "string"}, "description": AT_TEXT}
        for path, operations in document["paths"].items():
            for operation in operations.values() if shows_moment(path) else ():
                others = [each for each in operation.get("parameters", []) if each["name"] != "at"]
                operation["parameters"] = [*others, at]


def _no_capacity(_stream: StreamId, _block_size: int) -> dict[str, int]:
    return {}


def _refusing_routes() -> APIRouter:
    """Return routes that refuse what changes something."""
    router = APIRouter(include_in_schema=False)
    for path in (*_WRITING, "/workers", "/workers/{worker:path}"):
        router.add_api_route(path, _refuse, methods=["POST", "PATCH", "DELETE"])
    return router


async def _refuse(_request: Request) -> Response:
    detail = "this is a replay of a log, which changes nothing; ask the live service"
    raise ProblemError(409, ProblemKind.READ_ONLY, detail)
