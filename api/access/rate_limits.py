"""Bounds on requests in a second: of a token, and of a tenant."""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar

from api.background import following
from api.problems import ProblemError, ProblemKind
from indexer.tenants import TenantLimits
from kv_events.errors import shorten
from kv_events.http.parsed_query import ParsedQuery
from kv_events.runtime import words

logger = logging.getLogger(__name__)

_MAX_TENANTS = 4096
_ROUNDING_S = 1e-6


class RateLimit:
    """A bound on requests in a second. What a second leaves unused may come at once in the next one."""

    def __init__(self, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._spare_s = (max(1.0, per_s) - 1.0) / per_s
        self._clock = clock
        self._full_at = 0.0  # when a whole second's requests are permitted again, by the clock

    def wait_s(self) -> float:
        """Return the seconds after which a request is permitted; 0.0 if it is now."""
        wait_s = self._full_at - self._clock() - self._spare_s
        return wait_s if wait_s > _ROUNDING_S else 0.0

    def note(self, count: int = 1) -> None:
        """Count requests. More than are permitted now delay those after them."""
        self._full_at = max(self._full_at, self._clock()) + count / self._per_s


OF_REQUEST: ContextVar[RateLimit | None] = ContextVar("limit_of_request", default=None)
"""Bound on the requests with the token of the request that is being answered, which is counted already. The queries of
a batch count as requests of their own."""


class TenantRates:
    """Counts the answered queries of tenants that have a bound. Ask only for tenants that have workers."""

    def __init__(self, limits: TenantLimits) -> None:
        self.limits = limits
        self.refused: Counter[str] = Counter()
        """Tenant -> queries refused so far."""
        self._rates: dict[str, tuple[float, RateLimit]] = {}

    def following(self) -> AbstractAsyncContextManager[None]:
        """Read the file of limits again whenever it changes, in the background of a block."""
        limits = self.limits

        def use(text: str) -> None:
            limits.use(text)
            logger.info("limits of %s are known now", words.count(len(limits.named), "tenant"))

        return following("tenant limits", limits.text, limits.read, use, logger)

    def rate(self, tenant: str) -> RateLimit | None:
        """Return the bound of a tenant, or None if it has none."""
        per_s = self.limits.of(tenant).queries_per_s
        if per_s is None:
            return None
        known = self._rates.get(tenant)
        if known is None or known[0] != per_s:
            if len(self._rates) >= _MAX_TENANTS:
                self._rates.clear()
            known = self._rates[tenant] = (per_s, RateLimit(per_s))
        return known[1]

    def admit(self, question: ParsedQuery) -> None:
        """Count a query of a tenant. Raises ProblemError (429) if it has sent too many."""
        tenant, rate = question.tenant, self.rate(question.tenant)
        if rate is None:
            return
        if not (wait_s := rate.wait_s()):
            rate.note()
            return
        if tenant in self.refused or len(self.refused) < _MAX_TENANTS:
            self.refused[tenant] += 1
        field = "routing_group" if question.is_peer else "tenant_id"
        per_s = self.limits.of(tenant).queries_per_s
        detail = f"tenant {shorten(tenant)}: more than {per_s:g} queries in a second (queries_per_s)"
        raise ProblemError(429, ProblemKind.TENANT_LIMIT, detail, field, tenant, retry_after_s=math.ceil(wait_s))
