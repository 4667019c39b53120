"""How full workers are: from registrations, and from the engines' own metrics."""

from typing import Any

import httpx
import pytest

from api.app import create_app
from api.service import LiveService
from api.settings import ApiSettings, RegistrationSettings
from api.workers.reports import metrics_of
from bridge import EngineSettings
from indexer.slices import run_at_once
from tests.rigs.api import asking, embedded, samples
from tests.support.engines.event_payloads import payload, stored
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.http_checks import check_problem
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream
from tests.support.log.records import removed as removed_record
from tests.support.log.records import stored as stored_record
from tests.support.servers.embedded_service import TOKENS, reading, service
from tests.support.servers.scripted_server import Reply, scripted
from tests.support.waiting import async_wait_until

VLLM = 'vllm:cache_config_info{block_size="16",engine="0",num_cpu_blocks="None",num_gpu_blocks="400"} 1.0\n'
SGLANG = 'sglang:token_usage{model_name="m"} 0.2\nsglang:max_total_num_tokens{model_name="m",tp_rank="0"} 6400.0\n'


async def worker(client: httpx.AsyncClient) -> Any:
    (found,) = (await client.get("/fleet")).json()["workers"]
    return found


async def has_room(client: httpx.AsyncClient, pages: int) -> None:
    async def so() -> bool:
        return [each["capacity"] for each in (await client.get("/fleet")).json()["workers"]] == [{"GPU": pages}]

    await async_wait_until(so, 60, "the capacity")


async def test_a_registration_names_the_room_of_each_tier() -> None:
    async with reading(capacity={"gpu": 8, "cpu": 100}) as (served, engine):
        engine.send(payload(stored([1, 2, 3, 4], TOKENS)))
        await served.holds(16)
        found = await worker(served.client)
        assert found["capacity"] == {"GPU": 8, "CPU_PINNED": 100}
        assert found["lifetime_s"] is None
        room = {key[1:]: value for key, value in (await samples(served.client)).items() if "capacity_pages" in key[0]}
        assert room == {("GPU", "m", "default", "1"): 8, ("CPU_PINNED", "m", "default", "1"): 100}
        refused = {"instance_id": 2, "endpoint": engine.endpoint, "model_name": "m", "block_size": 4}
        check_problem(await served.client.post("/register", json={**refused, "capacity": {"tape": 1}}), 422)


@pytest.mark.parametrize("text", [VLLM, SGLANG])
async def test_an_engines_own_metrics_say_how_much_fits(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.workers.reports._RETRY_S", 0.1)
    async with scripted(*[Reply(body=b"x" * 9_000_000), *[Reply(body=text.encode())] * 100]) as http:
        async with reading(metrics_url=f"{http.url}/metrics") as (served, engine):
            engine.send(payload(stored([1, 2, 3, 4], TOKENS)))
            await served.holds(16)

            await has_room(served.client, 1600)  # pages of 4 tokens; the first answer was too long
        assert http.requests[-1].line == "GET /metrics HTTP/1.1"
        assert http.requests[-1].headers["host"] == http.url.removeprefix("http://")


@pytest.mark.parametrize("number", ["1e999", "1e300", "0", "5" * 30])
def test_room_of_absurd_size_is_not_believed(number: str) -> None:
    assert metrics_of(b"sglang:max_total_num_tokens %s\n" % number.encode(), [0])[0].room is None
    vllm = f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{number}"}} 1.0'
    assert metrics_of(vllm.encode(), [0])[0].room is None


async def test_the_metrics_of_a_configured_engine_need_no_permission() -> None:
    async with scripted(*[Reply(body=VLLM.encode())] * 100) as http:
        with ZmqEngine() as engine:
            given: dict[str, Any] = {"worker": "1", "model": "m", "block_size": 4, "metrics_url": f"{http.url}/metrics"}
            configured = [EngineSettings(endpoint=engine.endpoint, **given)]
            allowed = RegistrationSettings(register_allow="10.0.0.0/8")
            async with service(registration=allowed, configured=configured) as served:
                await async_wait_until(served.is_ready, 60)
                engine.send(payload(stored([1, 2, 3, 4], TOKENS)))
                await has_room(served.client, 1600)


@pytest.mark.parametrize(
    ("url", "status"),
    [
        ("http://169.254.169.254/metrics", 403),
        ("file:///etc/passwd", 422),
        ("http://u:p@127.0.0.1/metrics", 422),
        ("http://127.0.0.1/metrics?token=t", 422),
        ("http://127.0.0.1/admin", 422),
    ],
)
async def test_metrics_are_asked_for_only_where_engines_may_be(url: str, status: int) -> None:
    with ZmqEngine() as engine:
        async with reading(engine) as (served, _):
            body = {"instance_id": 2, "endpoint": engine.endpoint, "model_name": "m", "block_size": 4}
            problem = check_problem(await served.client.post("/register", json={**body, "metrics_url": url}), status)
            assert problem["field"] == "metrics_url"


async def test_copies_count_and_removed_pages_tell_how_long_a_page_stays(fed: HandFed) -> None:
    service = LiveService(fed.consumer, ApiSettings())
    async with asking(create_app(service)) as client:
        one, views = Stream("one"), fed.consumer.namespaces
        hashes = await fed.hold(one, list(range(1, 4001)))
        for now in (1e9, 1e9 + 5):
            run_at_once(service.history.sample(views.views, now))
            await fed.feed(
                one.batch(removed_record(hashes[-100:])), Stream("two").batch(stored_record((0, hashes[:900])))
            )
        found = (await client.get("/fleet")).json()
        assert found["duplicated"] == 0.5
        kept = {each["worker"]: each["lifetime_s"] for each in found["workers"]}
        assert kept["one"] == pytest.approx(900 / 20 * 2, rel=0.6)  # 100 pages in 5 s; the service takes samples, too
        assert kept["two"] is None


async def test_half_of_the_removed_pages_stayed_no_longer_than_the_median(
    client: httpx.AsyncClient, fed: HandFed
) -> None:
    one = Stream("one")
    before, long, short = (list(range(first, first + 256 * 100, 256)) for first in (256, 256 * 1000, 256 * 2000))
    await fed.feed(one.batch(now=1000))
    assert (await worker(client))["lifetime_p50_s"] is None  # pages are followed from now on
    one.held = {(page, 0) for page in before}
    await fed.feed(one.resync(now=1000), one.batch(stored_record((0, long)), now=1000))
    await fed.feed(one.batch(stored_record((0, short)), now=1100))
    await fed.feed(one.batch(removed_record([*before, *short, *long[:10]]), now=1103))

    async def is_shown() -> bool:
        found = (await worker(client))["lifetime_p50_s"]
        return found is not None and abs(found - 3) < 0.1  # of those before the resync, nobody knows the age

    await async_wait_until(is_shown, 60, "the median")


async def test_metrics_can_do_without_names_of_workers() -> None:
    async with embedded(api=ApiSettings(metrics_max_workers=0)) as client:
        for number in range(3):
            body: dict[str, Any] = {"instance_id": f"engine-{number}", "endpoint": f"tcp://127.0.0.1:{number + 1}"}
            body |= {"model_name": "m", "block_size": 4, "capacity": {"gpu": 10}}
            assert (await client.post("/register", json=body)).status_code == 201
        found = await samples(client)
        assert "engine-" not in (await client.get("/metrics")).text
        assert sum(value for key, value in found.items() if key[0] == "kvsight_bridge_link") == 3
        assert found["kvsight_worker_capacity_pages", "GPU", "other", "other", "other"] == 30
