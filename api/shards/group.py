"""A member of a shard group: its parts, put together for the application."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import msgspec
from fastapi import APIRouter, FastAPI
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from api.access.tenants import TenantQueries
from api.openapi import answers
from api.queries.routes import json_response
from api.settings import ApiSettings
from api.shards.forwarding import AskOthers
from api.shards.local_shard import OwnViews
from api.shards.members import Connections, Peers
from api.shards.routes import ShardRoutes
from api.shards.scatter_gather import Gatherer
from indexer.consumer import Consumer
from indexer.shards.membership import Membership
from indexer.shards.settings import GroupSettings
from kv_events.errors import InvalidValueError
from kv_events.http.shards import Shards
from kv_events.runtime.settings import read_secret
from kv_events.runtime.tls import TlsFiles
from kv_events.runtime.variables import variable


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
        connections = Connections(_token(settings, api), tls, serves_tls=api.tls_cert_file is not None)
        self._peers = Peers(membership.id, connections, settings.group_deadline_s)
        self.gatherer = Gatherer(self._own, membership, self._peers)
        """Answers questions for the whole group."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Be a member during a block, in which the consumer runs. It ends before the group is left."""
        async with self.membership.running(), self.gatherer.running():
            yield

    def add_to(self, app: FastAPI) -> None:
        """Add what an application has only in a group. The middleware is added as the innermost one."""
        app.include_router(_shards_routes(self.gatherer))
        app.add_middleware(AskOthers, membership=self.membership, peers=self._peers)

    def metrics(self) -> Collector:
        """Return what `GET /metrics` says about the group."""
        return ShardMetrics(self.gatherer)

    def routes(self, max_body_bytes: int, *, must_be_ready: bool, tenants: TenantQueries | None = None) -> ShardRoutes:
        """Return the query routes. See `HotRoutes`."""
        return ShardRoutes(
            self._consumer, self.gatherer, self._own, max_body_bytes, must_be_ready=must_be_ready, tenants=tenants
        )


class ShardMetrics(Collector):
    """The group as this member sees it, read at each scrape."""

    def __init__(self, gatherer: Gatherer) -> None:
        self._gatherer = gatherer

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families."""
        shards = self._gatherer.shards()
        missing = sum(len(each.partitions) for each in shards.missing)
        yield GaugeMetricFamily("kvsight_group_members", "Members of the shard group", value=len(shards.members))
        yield GaugeMetricFamily("kvsight_group_partitions", "Partitions of this member", value=len(shards.claims))
        yield GaugeMetricFamily("kvsight_group_missing_partitions", "Partitions that answers lack", value=missing)
        given_up = self._gatherer.given_up
        yield CounterMetricFamily("kvsight_group_given_up", "Answers of members that did not come", value=given_up)


def _shards_routes(gatherer: Gatherer) -> APIRouter:
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
