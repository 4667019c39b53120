"""A member of a shard group: its parts, put together for the application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from api.hot import json_response
from api.openapi import answers
from api.settings import ApiSettings
from api.shards.gather import Gatherer
from api.shards.own_views import OwnViews
from api.shards.peers import Peers
from api.shards.routes import ShardRoutes
from api.tenant_queries import TenantQueries
from indexer.consumer import Consumer
from indexer.shards.membership import Membership
from indexer.shards.settings import GroupSettings
from kv_events.errors import InvalidValueError
from kv_events.settings import read_secret
from kv_events.tls import TlsFiles
from kv_events.variables import variable
from kvsight.schemas.shards import Shards


class ShardGroup:
    """The group as its member sees it."""

    def __init__(self, consumer: Consumer, membership: Membership, settings: GroupSettings, api: ApiSettings) -> None:
        """consumer: that of a member. Raises InvalidValueError for settings that do not fit each other."""
        assert consumer.share is not None
        self.membership = membership
        self._consumer = consumer
        self._own = OwnViews(consumer, consumer.share)
        tls = None
        if settings.group_ca_file is not None:
            tls = TlsFiles("group", settings.group_ca_file, None, None, None).context()
        self.peers = Peers(membership.id, _token(settings, api), tls, settings.group_deadline_s)
        """The other members."""
        self.gatherer = Gatherer(self._own, membership, self.peers)
        """Answers questions for the whole group."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Be a member during a block, in which the consumer runs. It ends before the group is left."""
        async with self.membership.running(), self.gatherer.running():
            yield

    def routes(self, max_body_bytes: int, *, must_be_ready: bool, tenants: TenantQueries | None = None) -> ShardRoutes:
        """Return the query routes. See `HotRoutes`."""
        return ShardRoutes(
            self._consumer, self.gatherer, self._own, max_body_bytes, must_be_ready=must_be_ready, tenants=tenants
        )


def shards_routes(gatherer: Gatherer) -> APIRouter:
    """Return the route that shows the group."""
    router = APIRouter(tags=["service"])

    @router.get("/shards", response_class=Response, responses=answers(Shards, "The group as this member sees it"))
    async def shards() -> Response:
        """Return the members of the group with their partitions, and what answers lack at the moment."""
        return json_response(msgspec.json.encode(gatherer.shards()))

    return router


def _token(settings: GroupSettings, api: ApiSettings) -> str | None:
    """Return the token that is sent to the other members."""
    if settings.group_token_file is not None:
        return read_secret("group_token_file", settings.group_token_file)
    if api.api_token is not None:
        return api.api_token.get_secret_value()
    if api.api_tokens_file is not None:
        expected = "a token with the scope read, because the members need one to ask each other"
        raise InvalidValueError(variable("group_token_file"), None, expected)
    return None
