"""Gives each request the moment of the log that its parameter `at` names."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path
from urllib.parse import parse_qsl

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.page.state import PageState
from api.page.worker_history import WorkerHistory
from api.problems import ProblemError, ProblemKind
from api.queries.routes import ClientDisconnectedError, read_body
from api.replay.curves import DecisionHistory, RateHistory
from api.replay.markers import MarkerSearch
from api.replay.moments import History, OpenMoment, OpenMoments
from indexer.applier import Applier
from indexer.freshness import Freshness
from indexer.namespaces import Namespaces
from indexer.replay import Timeline
from indexer.views import View

_present: ContextVar[OpenMoment] = ContextVar("moment")
_MAX_FIELDS = 100
_PATHS = frozenset(
    {
        *("/query", "/query_by_hash", "/query/batch", "/explain"),
        *("/workers", "/dump", "/metrics", "/fleet", "/residency", "/funnel"),
    }
)


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
                receive = await _received(scope, receive, self._max_body_bytes)
            async with self._moments.opened(moment) as opened:
                _present.set(opened)
                await self._app(scope, receive, send)
        except ProblemError as problem:
            await problem.response()(scope, receive, send)
        except ClientDisconnectedError:
            return


async def _received(scope: Scope, receive: Receive, limit: int) -> Receive:
    """Read the body of a request. Returns what gives it again. Raises ProblemError and ClientDisconnectedError."""
    body = await read_body(receive, Headers(scope=scope).get("content-length"), limit)
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again


def asked_moment(scope: Scope) -> str | None:
    """Return the parameter `at` of a request. Raises ProblemError if there are several."""
    try:
        fields = parse_qsl(scope["query_string"].decode(), keep_blank_values=True, max_num_fields=_MAX_FIELDS)
    except ValueError:
        raise ProblemError(
            422, ProblemKind.INVALID_VALUE, f"more than {_MAX_FIELDS} parameters, or not UTF-8"
        ) from None
    found = [value for name, value in fields if name == "at"]
    if len(found) > 1:
        raise ProblemError(422, ProblemKind.INVALID_VALUE, "at: given more than once", "at")
    return found[0] if found else None


class ReplayViews:
    """The views as of the moment of the request. See `api.view_source.ViewSource`."""

    ready = True

    @property
    def namespaces(self) -> Namespaces:
        """The views."""
        return present_moment().views.namespaces

    @property
    def freshness(self) -> Freshness:
        """What tells their states."""
        return present_moment().views.freshness

    @property
    def applier(self) -> Applier:
        """What has applied the records of the moment, with their counts."""
        return present_moment().views.applier

    def why_not_ready(self) -> str:
        """Return "": everything that belongs to a moment has been applied."""
        return ""

    def reason(self, view: View) -> str:
        """Return why a view cannot be fully trusted, or "" if it can."""
        return self.freshness.reason(view)

    def now(self) -> float:
        """Return the time of the moment."""
        return present_moment().views.now


class PageStates:
    """Opens the scene of the moment that a request names."""

    def __init__(self, folder: Path, moments: OpenMoments, marks: MarkerSearch) -> None:
        self._moments = moments
        self._marks = marks
        self._rates = RateHistory()
        self._decisions = DecisionHistory(folder)

    async def open(self, _at: str | None) -> PageState:
        """Return the scene of the moment that `MomentMiddleware` holds open. See `PageStateAt`."""
        opened = present_moment()
        index, now = opened.views.index, opened.views.now

        def history(timeline: Timeline) -> History:
            return opened.history or History(
                self._rates.rates(timeline, now), self._decisions.funnel(timeline, index, now)
            )

        found = opened.history
        if found is None:
            found = opened.history = await self._moments.work(history)
        return PageState(
            key=f"{opened.moment.text} {self._moments.extent.next_index} {self._marks.next_index}",
            is_past=True,
            views=ReplayViews(),
            is_resync_requested=lambda _view: False,
            engines={},
            watch=WorkerHistory.of_past(found.rates, self._marks.changes_before(index)),
            funnel=lambda _now: found.funnel,
        )
