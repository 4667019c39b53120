"""The page over several processes: one of them answers its routes, so that its curves are those of one history."""

from __future__ import annotations

from collections.abc import Set

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from api.replicas.asking import Siblings
from api.replicas.replica import Replica


class FromEldest:
    """Middleware that lets the process that serves for the longest time answer some paths, because it has seen most.

    If it does not answer, this process does.
    """

    def __init__(self, app: ASGIApp, replica: Replica, siblings: Siblings, paths: Set[str]) -> None:
        self._app = app
        self._replica = replica
        self._siblings = siblings
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = None
        if scope["type"] == "http" and scope["method"] == "GET" and scope["path"] in self._paths:
            response = await self._answer(scope)
        await (response or self._app)(scope, receive, send)

    async def _answer(self, scope: Scope) -> Response | None:
        eldest = self._replica.shared.eldest()
        if eldest is None or eldest == self._replica.number:
            return None
        query = scope["query_string"].decode("latin-1")
        answer = await self._siblings.get(eldest, scope["path"] + (f"?{query}" if query else ""))
        if answer is None:
            return None
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))
