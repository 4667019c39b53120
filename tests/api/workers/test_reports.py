"""The load of engines, from their own metrics."""

import asyncio
import time
from functools import partial
from typing import Any

import httpx
import pytest

from api.workers.allowed_addresses import AllowedAddresses
from api.workers.reports import Reports, metrics_of
from kv_events.streams import StreamId
from tests.support.engines.event_payloads import payload, stored
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.log.hand_fed import HandFed
from tests.support.servers.embedded_service import TOKENS, reading, service
from tests.support.servers.scripted_server import HANG_UP, Reply, scripted
from tests.support.waiting import async_wait_until

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 5.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.025
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 1e-05
vllm:cache_config_info{block_size="4",engine="0",num_gpu_blocks="400"} 1.0
vllm:cache_config_info{block_size="4",engine="1",num_gpu_blocks="400"} 1.0
"""
SGLANG = """\
sglang:num_running_reqs{dp_rank="0",model_name="m",tp_rank="0"} 3.0
sglang:num_queue_reqs{dp_rank="0",model_name="m",tp_rank="0"} 2.0
sglang:token_usage{dp_rank="0",model_name="m",tp_rank="0"} 0.5
sglang:num_used_tokens{dp_rank="0",model_name="m",tp_rank="0"} 40.0
sglang:max_total_num_tokens{dp_rank="0",model_name="m",tp_rank="0"} 1600.0
"""


@pytest.mark.parametrize("text", [VLLM, SGLANG])
def test_running_and_waiting_requests_and_their_tokens_are_read(text: str) -> None:
    assert metrics_of(text.encode(), [0])[0] == (1600, 5, 40)
    without_used = "".join(line for line in text.splitlines(keepends=True) if "num_used_tokens" not in line)
    assert metrics_of(without_used.encode(), [0])[0].used_tokens == (40 if text == VLLM else 800)
    assert metrics_of(VLLM.encode(), [1])[0] == (1600, 5, 0)
    assert metrics_of(VLLM.encode(), [7])[0] == (1600, 5, 40)  # no label names it: the first sample counts


@pytest.mark.parametrize("text", ["", VLLM.replace("3.0", "-1"), SGLANG.replace("2.0", "1e300"), "vllm:x 1\n"])
def test_no_load_is_made_of_absurd_numbers(text: str) -> None:
    assert metrics_of(text.encode(), [0])[0].requests is None


@pytest.mark.parametrize(
    "text",
    [
        "vllm:num_requests_running{\n" * 80_000,
        "vllm:num_requests_running{" + "}" * 2**21,
        "vllm:num_requests_running{" + "a" * 2**21 + "} 1\n",
        "vllm:num_requests_running{" + 'a="' * 2**19 + "} 1\n",
    ],
)
def test_hostile_texts_take_time_in_proportion_to_their_length(text: str) -> None:
    began = time.monotonic()
    metrics_of(text.encode(), range(1024))
    assert time.monotonic() - began < 10  # milliseconds; with the square of the length, many minutes


def test_a_label_may_contain_a_brace() -> None:
    assert metrics_of(VLLM.replace('name="m"', 'name="{m}"').encode(), [0, 1]) == [(1600, 5, 40), (1600, 5, 0)]


async def reported(client: httpx.AsyncClient) -> list[tuple[int, int]]:
    (model,) = (await client.get("/loads")).json()
    return [(each.get("reported_requests"), each.get("reported_blocks")) for each in model["loads"]]


async def test_loads_show_what_the_engine_of_a_record_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.workers.reports._RETRY_S", 0.1)
    async with scripted(*[HANG_UP] * 2, *[Reply(body=VLLM.encode())] * 600) as http, service() as served:
        with ZmqEngine() as engine:
            body: dict[str, Any] = {"worker_id": 1, "model_name": "m", "block_size": 4, "endpoint": http.url}
            await served.client.post("/workers", json=body | {"kv_events_endpoints": {"0": engine.endpoint}})
            await asyncio.to_thread(engine.wait_for_readers)
            engine.send(payload(stored([1, 2, 3, 4], TOKENS)))
            await served.holds(16)

            async def is_reported() -> bool:
                await served.client.post("/select", json={"model_name": "m", "token_ids": TOKENS})
                return await reported(served.client) == [(5, 10)]

            await async_wait_until(is_reported, 60, "the engine's load")
            (worker,) = (await served.client.get("/fleet")).json()["workers"]
            assert worker["capacity"] == {"GPU": 400}
            assert {request.line for request in http.requests} == {"GET /metrics HTTP/1.1"}


async def test_room_and_pages_in_use_are_not_known_where_attention_groups_share_them() -> None:
    """An engine counts blocks, of which a page takes one in each group."""
    async with (
        scripted(*[Reply(body=VLLM.encode())] * 600) as http,
        reading(metrics_url=f"{http.url}/metrics") as parts,
    ):
        served, engine = parts
        for number, kind in enumerate(("full_attention", "sliding_window")):
            group: dict[str, Any] = {"group_idx": number, "kv_cache_spec_kind": kind, "kv_cache_spec_sliding_window": 8}
            engine.send(payload(stored([1, 2, 3, 4], TOKENS, **group), form="map"))

            async def is_shown(blocks: int | None) -> bool:
                await served.client.post("/select", json={"model_name": "m", "token_ids": TOKENS})
                (worker,) = (await served.client.get("/fleet")).json()["workers"]
                return await reported(served.client) == [(5, blocks)] and bool(worker["capacity"]) == (
                    blocks is not None
                )

            await async_wait_until(partial(is_shown, None if number else 10), 60, "the engine's load")


async def follow(url: str, allow: str, until: Any) -> Reports:
    """Read the metrics of one rank until a condition holds."""
    fed, stream = HandFed(), StreamId("m", "default", "w", 0)
    found = Reports(fed.consumer, lambda: {stream: url}, AllowedAddresses(allow))
    task = asyncio.create_task(found.follow())
    try:
        await async_wait_until(lambda: until(found.of(stream)), 60, "a report")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return found


async def test_a_report_is_forgotten_after_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scripted(*[Reply(body=SGLANG.encode())] * 600) as http:
        found = await follow(f"{http.url}/metrics", "*", lambda report: report is not None)
    stream = StreamId("m", "default", "w", 0)
    first = found.of(stream)
    assert first is not None
    assert found.of(stream) is first
    assert found.room(stream) == 1600
    monkeypatch.setattr(time, "time", lambda: first.at + 5.1)
    assert found.of(stream) is None


async def test_no_address_is_asked_that_is_not_allowed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = time.monotonic  # the line is not repeated for 30 s after another test's
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 30)
    async with scripted(Reply(body=VLLM.encode())) as http:
        await follow(f"{http.url}/metrics", "10.0.0.0/8", lambda _: "not permitted" in caplog.text)
        assert not http.requests


async def test_the_log_says_what_an_engine_does_not_tell(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = time.monotonic  # as above
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 60)
    async with scripted(*[Reply(body=b"vllm:num_requests_running 1\nvllm:num_requests_waiting 1\n")] * 600) as http:
        await follow(f"{http.url}/metrics", "*", lambda _: "they do not tell room, used_tokens" in caplog.text)


async def test_reports_of_ranks_that_share_an_address_cost_one_request(fed: HandFed) -> None:
    ranks = [StreamId("m", "default", "w", rank) for rank in (0, 1)]
    async with scripted(*[Reply(body=VLLM.encode())] * 600) as http:
        found = Reports(fed.consumer, lambda: dict.fromkeys(ranks, f"{http.url}/metrics"), AllowedAddresses("*"))
        task = asyncio.create_task(found.follow())
        await async_wait_until(lambda: all(map(found.of, ranks)), 60, "reports")
        assert len(http.requests) == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert [report.requests for rank in ranks if (report := found.of(rank)) is not None] == [5, 5]
