"""Prefetched pages, from storage to a router's answer."""

from api.app import create_app
from api.service import LiveService
from api.settings import ApiSettings
from engine_cache import Lane
from publisher import EventPublisher, PublisherSettings
from publisher.sinks.memory import MemorySink
from tests.rigs.api import asking
from tests.rigs.cache import ABCD, CacheRig
from tests.rigs.cache_steps import archived
from tests.support.log.hand_fed import HandFed
from tests.support.waiting import async_wait_until


async def test_a_router_sees_prefetched_pages_before_any_request_has_used_them() -> None:
    rig, fed = CacheRig("hiradix"), HandFed()
    archived(rig, ABCD)
    settings = PublisherSettings(model="m", worker="engine-0", block_size=rig.page_size)
    app = create_app(LiveService(fed.consumer, ApiSettings()))
    async with asking(app) as router, EventPublisher(settings, MemorySink(fed.log)) as publisher:

        async def scores() -> tuple[int, int] | None:
            """Return the cumulative tokens on device and host, or None if no page of the prompt is known."""
            response = await router.post("/query", json={"model_name": "m", "token_ids": ABCD})
            instance = response.json().get("instances", {}).get("engine-0")
            return instance and (instance["gpu"], instance["cpu"])

        await async_wait_until(lambda: fed.consumer.namespaces.view(publisher.stream) is not None)
        rig.prefetch(ABCD)
        rig.run(Lane.PREFETCH)
        publisher.publish(rig.cache.take_events())
        assert await scores() is None  # they have arrived but are not in the tree yet
        assert rig.cache.check_prefetch_progress("r")
        publisher.publish(rig.cache.take_events())

        async def are_seen() -> bool:
            return await scores() == (0, len(ABCD))

        await async_wait_until(are_seen, what="the prefetched pages in the answer")
    assert len(rig.match(ABCD).device_indices) == 0
