"""Metrics of tenants, if they have limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from api.access.tenants import TenantRates
from api.served_views import ViewSource

_LABELS = ("tenant",)
_MAX_TENANTS = 200
_OTHER = "other"
"""Label of all tenants beyond the first ones. Those with a table in the file come first."""


class TenantMetrics(Collector):
    """What each tenant uses and what was refused, read at each scrape."""

    def __init__(self, served: ViewSource, queries: TenantRates) -> None:
        self._served = served
        self._queries = queries

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families."""
        namespaces = self._served.namespaces
        refused = Counter(stream.tenant for stream in namespaces.refused)
        known = dict.fromkeys([*self._queries.limits.named, *namespaces.tenants, *refused, *self._queries.refused])
        shown = set(list(known)[:_MAX_TENANTS])
        streams, pages, refusals, queries = (Counter[str]() for _ in range(4))
        for tenant in known:
            label = tenant if tenant in shown else _OTHER
            streams[label] += namespaces.num_streams(tenant)
            pages[label] += namespaces.num_pages(tenant)
            refusals[label] += refused[tenant]
            queries[label] += self._queries.refused[tenant]
        yield _gauge("kvsight_tenant_worker_streams", "Worker streams that have a view", streams)
        yield _gauge("kvsight_tenant_pages", "Distinct pages, over all namespaces", pages)
        yield _gauge("kvsight_tenant_refused_streams", "Worker streams beyond the limit", refusals)
        family = CounterMetricFamily("kvsight_tenant_refused_queries", "Queries beyond the limit", labels=_LABELS)
        for tenant, count in queries.items():
            family.add_metric([tenant], count)
        yield family


def _gauge(name: str, help_text: str, values: Counter[str]) -> Metric:
    family = GaugeMetricFamily(name, help_text, labels=_LABELS)
    for tenant, value in values.items():
        family.add_metric([tenant], value)
    return family
