"""A member of a shard group: its parts, put together for the application, and its routes about workers.

A worker is found whichever member is asked.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
from fastapi import APIRouter
from prometheus_client.core import Metric
from starlette.datastructures import QueryParams
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.access.guard import header
from api.fast.fast_path import GroupAnswers
from api.http_pool import HttpAnswer, NoAnswerError
from api.openapi import answers
from api.problems import MEDIA_TYPE as PROBLEM_TYPE
from api.problems import ProblemError, ProblemKind
from api.queries.body_formats import Body, BodyFormat, format_of, is_large
from api.queries.parsing import BY_HASH, BY_TOKENS, decode_question
from api.queries.routes import RawEndpoint, json_response, missing_header
from api.settings import ApiSettings
from api.shards.scatter_gather import LocalShard, ScatterGather, not_joined
from api.shards.wire import PATH, Members, ShardRequest, decode_request, encode
from api.telemetry.families import counter, gauge
from indexer.consumer import Consumer
from indexer.shards.assignment import Member
from indexer.shards.membership import Membership
from indexer.shards.settings import GroupSettings
from indexer.views import STATES
from kv_events.errors import InvalidValueError
from kv_events.http.service import Shards
from kv_events.runtime.settings import read_secret
from kv_events.runtime.tls import TlsFiles
from kv_events.runtime.variables import variable

_GROWTH = 4
"""Bytes of the hashes of a prompt for each byte of its tokens: a page of one token is two bytes of JSON."""
_ROOM = 2**20


class ShardGroup:
    """The group as its member sees it."""

    def __init__(self, consumer: Consumer, membership: Membership, settings: GroupSettings, api: ApiSettings) -> None:
        """consumer: that of a member. Raises InvalidValueError for settings that do not fit each other."""
        assert consumer.owned is not None
        self.membership = membership
        self._own = LocalShard(consumer, consumer.owned)
        tls = None
        if settings.group_ca_file is not None:
            tls = TlsFiles("group", settings.group_ca_file, None, None, None).context()
        self._peers = Members(
            membership.id,
            settings.group_deadline_s,
            _token(settings, api),
            tls,
            serves_tls=api.tls_cert_file is not None,
        )
        self.gatherer = ScatterGather(self._own, membership, self._peers)
        """Answers questions for the whole group."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Be a member during a block, in which the consumer runs. It ends before the group is left."""
        async with self.membership.running(), self.gatherer.running():
            yield

    def middleware(self) -> Middleware:
        """Return the innermost middleware of the application."""
        return Middleware(ForwardToMembers, membership=self.membership, peers=self._peers)

    def routes(self) -> APIRouter:
        """Return the route that shows the group."""
        router = APIRouter(tags=["service"])

        @router.get("/shards", response_class=Response, responses=answers(Shards, "The group as this member sees it"))
        async def shards() -> Response:
            """Return the members of the group with their partitions, and what answers lack at the moment."""
            return json_response(self.gatherer.shards())

        return router

    def families(self) -> Iterator[Metric]:
        """Yield the metric families."""
        shards = self.gatherer.shards()
        missing = sum(len(each.partitions) for each in shards.missing)
        yield gauge("kvsight_group_members", "Members of the shard group", len(shards.members))
        yield gauge("kvsight_group_partitions", "Partitions of this member", len(shards.claims))
        yield gauge("kvsight_group_missing_partitions", "Partitions that answers lack", missing)
        yield counter("kvsight_group_given_up", "Answers of members that did not come", self.gatherer.given_up)

    def endpoints(self, max_body_bytes: int) -> dict[str, RawEndpoint]:
        """Path -> ASGI application for POST: what members ask each other."""
        return {PATH: RawEndpoint(self._reply, _GROWTH * max_body_bytes + _ROOM)}

    def fast_answers(self, *, has_tenants: bool) -> GroupAnswers:
        """Return how small requests are answered by the fast path. has_tenants: whether their queries have bounds."""
        fields = {} if has_tenants else {"/query": BY_TOKENS, "/query_by_hash": BY_HASH}
        asks = {path: partial(self._answer_inline, names) for path, names in fields.items()}
        return GroupAnswers({PATH: self._reply_inline}, asks)

    async def _answer_inline(self, fields: Collection[str], body: bytes, content_type: str) -> bytes | None:
        """Answer a query if nothing is missing. What is missing goes into a header, too."""
        if is_large(body) or self.gatherer.missing:
            return None
        self.gatherer.check_ready()
        asked = decode_question(body, format_of(content_type), fields)
        if asked[0].is_detailed or not self.gatherer.knows(asked[0]):
            return None
        (found,), missing = await self.gatherer.answer([asked])
        return None if missing or isinstance(found, ProblemError) else found

    async def _reply(self, body: Body, _body_format: BodyFormat) -> Response:
        asked = await asyncio.to_thread(_decoded, body) if is_large(body) else _decoded(body)
        return Response(encode(await self._own.reply(asked)), media_type="application/msgpack")

    def _reply_inline(self, body: bytes) -> bytes | None:
        if is_large(body):
            return None
        asked = _decoded(body)
        return encode(self._own.reply_inline(asked)) if len(asked.prompts) <= 1 else None


def _token(settings: GroupSettings, api: ApiSettings) -> str | None:
    if settings.group_token_file is not None:
        return read_secret("group_token_file", settings.group_token_file)
    if api.api_token is not None:
        return api.api_token.get_secret_value()
    if api.api_tokens_file is not None:
        expected = "a token with the scope read, because the members need one to ask each other"
        raise InvalidValueError(variable("group_token_file"), None, expected)
    return None


def _decoded(body: Body) -> ShardRequest:
    try:
        asked = decode_request(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProblemError(400, ProblemKind.MALFORMED_BODY, f"body: {error}") from None
    for ask in asked.prompts:
        for packed in ask.hashes.values():
            if len(packed) % 8:
                raise ProblemError(422, ProblemKind.INVALID_VALUE, "hashes: expected a multiple of 8 bytes", "hashes")
    return asked


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
