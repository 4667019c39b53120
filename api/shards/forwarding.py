"""Routes about workers in a group: a worker is found whichever member is asked."""

import asyncio
import re
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
from starlette.datastructures import QueryParams
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.access.guard import header
from api.http_pool import HttpAnswer, NoAnswerError
from api.problems import MEDIA_TYPE as PROBLEM_TYPE
from api.problems import ProblemError, ProblemKind
from api.queries.routes import missing_header
from api.shards.scatter_gather import not_joined
from api.shards.wire import Members
from indexer.shards.assignment import Member
from indexer.shards.membership import Membership
from indexer.views import STATES

_FORWARDED = "kvsight-forwarded"
_TRUST = {state.value: number for number, state in enumerate(STATES)}
_JSON = "application/json"
_ALL = "/workers"
_ONE = re.compile(r"/workers/(?P<worker>.+)/(?P<action>view|resync)", re.DOTALL)
_PARAMETERS = {
    "": frozenset({"model_name", "routing_group"}),
    "view": frozenset({"dp_rank", "model", "tenant", "limit", "cursor"}),
    "resync": frozenset({"dp_rank", "model", "tenant"}),
}
_DEFINITE = frozenset({HTTPStatus.OK, HTTPStatus.ACCEPTED, HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY})
"""Answers that only a member gives that has the worker."""


class _Listed(msgspec.Struct, frozen=True):
    """The name of a worker of a list, and which of two views of it is better."""

    model_name: str
    routing_group: str
    block_size: int
    instance_id: str
    state: str
    age_ms: int

    @property
    def rank(self) -> tuple[int, int]:
        """The lower the better."""
        return _TRUST.get(self.state, len(_TRUST)), self.age_ms


_split_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_listed = msgspec.json.Decoder(_Listed).decode


class ForwardToMembers:
    """Middleware: `GET /workers` lists the workers of all members; a route of one worker finds the member that has it.

    A request that another member has forwarded is never forwarded again. A forwarded request has the rights of its
    caller, never those of this member.
    """

    def __init__(self, app: ASGIApp, membership: Membership, peers: Members) -> None:
        self._app = app
        self._membership = membership
        self._peers = peers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        target = _target(scope) if scope["type"] == "http" else None
        if target is None:
            await self._app(scope, receive, send)
            return
        own = await _captured(self._app, scope, receive)
        is_list = scope["path"] == _ALL and own.status_code == HTTPStatus.OK
        if (is_list or own.status_code == HTTPStatus.NOT_FOUND) and not self._membership.is_assigned:
            own = not_joined(self._membership.group).response()
        elif is_list:
            own = await self._all_workers(scope, target, own)
        elif own.status_code == HTTPStatus.NOT_FOUND:
            own = await self._first_that_knows(scope, target, own)
        await own(scope, receive, send)

    async def _all_workers(self, scope: Scope, target: str, own: Response) -> Response:
        lists, missing = [_listed(bytes(own.body))], []
        for member, answer in await self._ask(scope, target):
            try:
                if isinstance(answer, NoAnswerError) or answer.status != HTTPStatus.OK:
                    missing += member.partitions
                else:
                    lists.append(_listed(answer.body))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                missing += member.partitions
        body = b"[" + b",".join(_distinct(lists)) + b"]"
        return Response(body, headers=missing_header(missing), media_type=_JSON)

    async def _first_that_knows(self, scope: Scope, target: str, own: Response) -> Response:
        """Return the answer of the member that has the worker. A 404 says that no member has it."""
        silent: list[tuple[Member, str]] = []
        for member, answer in await self._ask(scope, target):
            if isinstance(answer, NoAnswerError):
                silent.append((member, str(answer)))
            elif answer.status in _DEFINITE:
                media_type = _JSON if answer.status < HTTPStatus.BAD_REQUEST else PROBLEM_TYPE
                return Response(answer.body, answer.status, media_type=media_type)
            elif answer.status != HTTPStatus.NOT_FOUND:
                silent.append((member, f"it answers with status {answer.status}"))
        if not silent:
            return own
        detail = f"no member that answers has the worker; {silent[0][0].url}: {silent[0][1]}"
        response = ProblemError(503, ProblemKind.UNAVAILABLE, detail, retry_after_s=1).response()
        response.headers.update(missing_header(each for member, _ in silent for each in member.partitions))
        return response

    async def _ask(self, scope: Scope, target: str) -> list[tuple[Member, HttpAnswer | NoAnswerError]]:
        authorization = header(scope, b"authorization")
        headers = {_FORWARDED: "1"} | (
            {} if authorization is None else {"Authorization": authorization.decode("latin-1")}
        )
        peers = self._peers.of(self._membership.assignment.members)
        answers = await asyncio.gather(*(peer.forward(scope["method"], target, headers) for peer in peers))
        return [(peer.member, answer) for peer, answer in zip(peers, answers, strict=True)]


def _target(scope: Scope) -> str | None:
    """Return path and query to send to other members, or None if the request is not to be forwarded.

    They are built from the parameters of the route. Text of the caller could name another route, which the caller's
    token does not permit.
    """
    path, action = scope["path"], ""
    if header(scope, _FORWARDED.encode()) is not None:
        return None
    if path != _ALL:
        found = _ONE.fullmatch(path)
        if found is None or not {".", ".."}.isdisjoint(found["worker"].split("/")):
            return None
        action = found["action"]
        path = f"{_ALL}/{quote(found['worker'], safe='', errors='replace')}/{action}"
    if scope["method"] != ("POST" if action == "resync" else "GET"):
        return None
    given = QueryParams(scope["query_string"]).multi_items()
    query = urlencode([each for each in given if each[0] in _PARAMETERS[action]], quote_via=quote, errors="replace")
    return f"{path}?{query}" if query else str(path)


def _listed(body: bytes) -> list[tuple[_Listed, msgspec.Raw]]:
    """Return the workers of a list with their JSON. Raises msgspec.DecodeError."""
    return [(_decode_listed(raw), raw) for raw in _split_list(body)]


def _distinct(lists: Iterable[list[tuple[_Listed, msgspec.Raw]]]) -> list[msgspec.Raw]:
    """Join lists of workers. While partitions move, two members may have a worker: the better view counts."""
    found: dict[tuple[object, ...], tuple[_Listed, msgspec.Raw]] = {}
    for workers in lists:
        for worker, raw in workers:
            name = worker.model_name, worker.routing_group, worker.block_size, worker.instance_id
            if name not in found or worker.rank < found[name][0].rank:
                found[name] = worker, raw
    return [found[name][1] for name in sorted(found, key=str)]


async def _captured(app: ASGIApp, scope: Scope, receive: Receive) -> Response:
    begin: dict[str, Any] = {}
    body = bytearray()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            begin.update(message)
        else:
            body.extend(message.get("body", b""))

    await app(scope, receive, send)
    captured = Response(bytes(body), begin["status"])
    captured.raw_headers = list(begin["headers"])
    return captured
