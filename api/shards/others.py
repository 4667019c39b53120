"""Routes about workers in a group: a worker is found whichever member is asked."""

from __future__ import annotations

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

from api.shards.peers import PeerAnswer, PeerError, Peers
from api.shards.wire import MISSING_HEADER
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
_decode_list = msgspec.json.Decoder(list[dict[str, Any]]).decode


class AskOthers:
    """Middleware: `GET /workers` lists the workers of all members; a route of one worker finds the member that has it.

    A request that another member has forwarded is never forwarded again. A forwarded request has the rights of its
    caller, never those of this member.
    """

    def __init__(self, app: ASGIApp, membership: Membership, peers: Peers) -> None:
        self._app = app
        self._membership = membership
        self._peers = peers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        target = _target(scope) if scope["type"] == "http" else None
        if target is None:
            await self._app(scope, receive, send)
            return
        own = await _captured(self._app, scope, receive)
        if scope["path"] == _ALL and own.status_code == HTTPStatus.OK:
            own = await self._all_workers(scope, target, own)
        elif own.status_code == HTTPStatus.NOT_FOUND:
            own = await self._first_that_knows(scope, target, own)
        await own(scope, receive, send)

    async def _all_workers(self, scope: Scope, target: str, own: Response) -> Response:
        lists, missing = [_decode_list(own.body)], []
        for member, answer in await self._ask(scope, target):
            workers = _workers(answer)
            if workers is None:
                missing += member.partitions
            else:
                lists.append(workers)
        headers = {MISSING_HEADER: ",".join(map(str, sorted(missing)))} if missing else {}
        return Response(msgspec.json.encode(_distinct(lists)), headers=headers, media_type=_JSON)

    async def _first_that_knows(self, scope: Scope, target: str, own: Response) -> Response:
        for _, answer in await self._ask(scope, target):
            if not isinstance(answer, PeerError) and answer.status != HTTPStatus.NOT_FOUND:
                return Response(answer.body, answer.status, media_type=answer.content_type)
        return own

    async def _ask(self, scope: Scope, target: str) -> list[tuple[Member, PeerAnswer | PeerError]]:
        authorization = _header(scope, "authorization")
        headers = {_FORWARDED: "1"} | ({} if authorization is None else {"Authorization": authorization})
        peers = self._peers.of(self._membership.assignment.members)
        answers = await asyncio.gather(*(peer.forward(scope["method"], target, headers) for peer in peers))
        return [(peer.member, answer) for peer, answer in zip(peers, answers, strict=True)]


def _target(scope: Scope) -> str | None:
    """Return path and query to send to other members, or None if the request is not to be forwarded.

    They are built from the parameters of the route. Text of the caller could name another route, which the caller's
    token does not permit.
    """
    path, action = scope["path"], ""
    if _header(scope, _FORWARDED) is not None:
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


def _header(scope: Scope, name: str) -> str | None:
    value = next((value for each, value in scope["headers"] if each == name.encode()), None)
    return None if value is None else value.decode("latin-1")


def _workers(answer: PeerAnswer | PeerError) -> list[dict[str, Any]] | None:
    """Return the workers that a member lists, or None if it does not answer."""
    if isinstance(answer, PeerError) or answer.status != HTTPStatus.OK:
        return None
    try:
        return _decode_list(answer.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _distinct(lists: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Join lists of workers. While partitions move, two members may have a worker: the better view counts."""
    found: dict[tuple[object, ...], dict[str, Any]] = {}
    for workers in lists:
        for worker in workers:
            name = tuple(worker.get(field) for field in ("model_name", "routing_group", "block_size", "instance_id"))
            if name not in found or _rank(worker) < _rank(found[name]):
                found[name] = worker
    return [found[name] for name in sorted(found, key=str)]


def _rank(worker: dict[str, Any]) -> tuple[int, float]:
    return _TRUST.get(worker.get("state", ""), len(_TRUST)), worker.get("age_ms", 0)


async def _captured(app: ASGIApp, scope: Scope, receive: Receive) -> Response:
    """Return the complete answer of an application."""
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
