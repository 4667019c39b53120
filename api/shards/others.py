"""Routes about workers in a group: a worker is found whichever member is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.shards.peers import PeerAnswer, PeerError, Peers
from api.shards.wire import MISSING_HEADER
from indexer.shards.membership import Membership
from indexer.views import STATES

_FORWARDED = "kvsight-forwarded"
_TRUST = {state.value: number for number, state in enumerate(STATES)}
_JSON = "application/json"
_decode_list = msgspec.json.Decoder(list[dict[str, Any]]).decode


class AskOthers:
    """Middleware: `GET /workers` lists the workers of all members; a route of one worker finds the member that has it.

    A request that another member has forwarded is never forwarded again.
    """

    def __init__(self, app: ASGIApp, membership: Membership, peers: Peers) -> None:
        self._app = app
        self._membership = membership
        self._peers = peers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        is_forwarded = any(name == _FORWARDED.encode() for name, _ in scope.get("headers", ()))
        if is_forwarded or not (path == "/workers" or path.startswith("/workers/")):
            await self._app(scope, receive, send)
            return
        own = await _captured(self._app, scope, receive)
        if path == "/workers" and own.status_code == HTTPStatus.OK:
            own = await self._all_workers(scope, own)
        elif own.status_code == HTTPStatus.NOT_FOUND:
            own = await self._first_that_knows(scope, own)
        await own(scope, receive, send)

    async def _all_workers(self, scope: Scope, own: Response) -> Response:
        lists, missing = [_decode_list(own.body)], []
        for member, answer in await self._ask(scope):
            workers = _workers(answer)
            if workers is None:
                missing += member.partitions
            else:
                lists.append(workers)
        headers = {MISSING_HEADER: ",".join(map(str, sorted(missing)))} if missing else {}
        return Response(msgspec.json.encode(_distinct(lists)), headers=headers, media_type=_JSON)

    async def _first_that_knows(self, scope: Scope, own: Response) -> Response:
        for _, answer in await self._ask(scope):
            if not isinstance(answer, PeerError) and answer.status != HTTPStatus.NOT_FOUND:
                return Response(answer.body, answer.status, media_type=answer.content_type)
        return own

    async def _ask(self, scope: Scope) -> list[tuple[Any, PeerAnswer | PeerError]]:
        query = scope["query_string"].decode("latin-1")
        target = scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")
        peers = self._peers.of(self._membership.assignment.members)
        answers = await asyncio.gather(*(peer.forward(scope["method"], target, {_FORWARDED: "1"}) for peer in peers))
        return [(peer.member, answer) for peer, answer in zip(peers, answers, strict=True)]


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
