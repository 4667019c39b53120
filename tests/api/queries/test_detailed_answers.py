"""What MindIE-PyMotor registers, asks and reads: addresses by medium, and pages by tier for each rank."""

import logging
from typing import Any

import httpx
import msgspec
import pytest

from tests.support.engines.event_payloads import payload, stored
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.servers.embedded_service import TOKENS, Service, service
from tests.support.waiting import async_wait_until

RFC = {"modelname": "m", "block_size": 4, "type": "vLLM", "store_backend": "Mooncake"}
QUERY = {"model": "m", "block_size": 4, "token_ids": TOKENS}
PACKED = {"content-type": "application/msgpack"}
BLOCKS = {"matched_tokens": 12, "npu_blocks": 2, "cpu_blocks": 1, "disk_blocks": 0}
OTHER_BLOCKS = {"matched_tokens": 16, "npu_blocks": 1, "cpu_blocks": 1, "disk_blocks": 2}


async def registered(served: Service, engine: ZmqEngine, rank: int, **fields: Any) -> httpx.Response:
    return await served.client.post("/register", json={"instance_id": "w", "dp_rank": rank, **RFC, **fields})


async def ranks(served: Service, **fields: Any) -> Any:
    answer = await served.client.post("/query", json={**QUERY, **fields})
    return answer.json().get("default", {}).get("w", {}).get("DP")


async def test_addresses_by_medium_are_read_and_ranks_are_described_as_asked(caplog: pytest.LogCaptureFixture) -> None:
    with ZmqEngine(replay=False) as first, ZmqEngine(replay=False) as second, caplog.at_level(logging.WARNING):
        async with service() as served:
            everywhere = {"npu": first.endpoint, "cpu": first.endpoint, "disk": ""}
            assert (await registered(served, first, 0, medium_endpoints=everywhere)).is_success
            assert "not read" not in caplog.text
            elsewhere = {"gpu": second.endpoint, "cpu": first.endpoint}
            assert (await registered(served, second, 1, medium_endpoints=elsewhere)).is_success
            assert f"instance w: events of medium 'cpu' at '{first.endpoint}' are not read" in caplog.text
            first.wait_for_readers()
            second.wait_for_readers()
            first.send(payload(stored([1, 2], TOKENS[:8]), stored([3], TOKENS[8:12], parent=2, medium="CPU")))
            moved = [
                stored([2], TOKENS[4:8], parent=1, medium="CPU"),
                stored([3, 4], TOKENS[8:], parent=2, medium="FS"),
            ]
            second.send(payload(stored([1], TOKENS[:4]), *moved, rank=1))

            async def are_held() -> bool:
                return bool(await ranks(served, hit_detail=True) == {"0": BLOCKS, "1": OTHER_BLOCKS})

            await async_wait_until(are_held, 60, "the pages of both ranks")
            for hit_detail in (None, False, 0, ""):
                assert await ranks(served, hit_detail=hit_detail) == {"0": 8, "1": 4}
            by_json = (await served.client.post("/query", json={**QUERY, "hit_detail": "blocks"})).json()
            assert by_json["default"]["w"]["longest_matched"] == 16

            body = msgspec.msgpack.encode({**QUERY, "hit_detail": True})
            packed = await served.client.post("/query", content=body, headers=PACKED)
            assert packed.headers["content-type"] == "application/msgpack"
            assert msgspec.msgpack.decode(packed.content)["default"]["w"]["DP"] == by_json["default"]["w"]["DP"]
            plain = await served.client.post("/query", content=msgspec.msgpack.encode(QUERY), headers=PACKED)
            assert plain.json()["default"]["w"]["DP"] == {"0": 8, "1": 4}


@pytest.mark.parametrize("addresses", [{}, {"medium_endpoints": {"cpu": "tcp://h:1", "npu": ""}}])
async def test_a_registration_without_an_address_of_the_device_is_refused(addresses: dict[str, Any]) -> None:
    with ZmqEngine(replay=False) as engine:
        async with service() as served:
            answer = await registered(served, engine, 0, **addresses)
            assert (answer.status_code, answer.json()["field"]) == (422, "endpoint")
            assert "npu, gpu, xpu in medium_endpoints" in answer.json()["detail"]
