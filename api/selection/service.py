"""The selection service of one process: its parts, put together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fastapi import APIRouter

from api.access.rate_limits import TenantRates
from api.queries.routes import RawEndpoint
from api.selection.requests import Render
from api.selection.reservations import Reservations
from api.selection.routes import SelectionRoutes
from api.view_source import ViewSource
from selection.exchange import ReservationExchange
from selection.policies import create_policy
from selection.roster import Directory, Rosters
from selection.selector import Selector
from selection.settings import SelectionSettings


class SelectionService:
    """Chooses workers, and keeps the book of what they were given."""

    def __init__(
        self,
        served: ViewSource,
        settings: SelectionSettings,
        directory: Directory,
        exchange: ReservationExchange,
        render: Render,
        tenants: TenantRates | None,
        is_ready: Callable[[], bool],
        max_body_bytes: int,
    ) -> None:
        """exchange: has the book, and gets each record after it was applied. render: see `Render`.

        tenants: bounds on their requests, if any. is_ready: whether workers may be chosen yet.
        """
        self.exchange = exchange
        rosters = Rosters(exchange.book, directory)
        selector = Selector(rosters, partial(create_policy, settings.policy), exchange.replica)
        self._reservations = Reservations(served, rosters, exchange, is_ready, max_body_bytes)
        self._routes = SelectionRoutes(served, selector, self._reservations, render, tenants, max_body_bytes)
        self.text_routes = self._routes.text_routes
        """See `SelectionRoutes`."""
        self.bodyless_route = self._reservations.bodyless_route
        """See `Reservations`."""

    def endpoints(self) -> dict[str, RawEndpoint]:
        """Path -> ASGI application for POST."""
        return {**self._routes.endpoints(), **self._reservations.endpoints()}

    def router(self) -> APIRouter:
        """Return the other routes."""
        return self._reservations.router()
