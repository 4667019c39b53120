"""Names of workers, models and tenants are checked wherever they enter: 1 to 256 bytes of UTF-8."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from bridge import EngineSettings
from kv_events.errors import InvalidValueError
from publisher import PublisherSettings
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream, stored
from tests.support.servers.embedded_service import service

LONGEST = "é" * 128
BAD = {"empty": "", "too long": "x" * 257, "too many bytes": "é" * 129}
FIELDS = ("worker", "model", "tenant")


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("field", FIELDS)
def test_settings_of_publishers_and_bridges_name_the_field(field: str, bad: str) -> None:
    names: dict[str, Any] = {"worker": "w", "model": "m", "tenant": "t"}
    PublisherSettings(**{**names, field: LONGEST}, block_size=4)
    EngineSettings(**{**names, field: LONGEST}, endpoint="tcp://127.0.0.1:1")
    with pytest.raises(InvalidValueError, match=f"KVSIGHT_{field.upper()}"):
        PublisherSettings(**{**names, field: bad}, block_size=4)
    with pytest.raises(InvalidValueError, match=field):
        EngineSettings(**{**names, field: bad}, endpoint="tcp://127.0.0.1:1")


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
async def test_a_record_with_a_bad_name_is_a_dead_letter(bad: str) -> None:
    fed = HandFed()
    async with fed.consumer.running():
        for stream in (Stream(bad), Stream("w", model=bad), Stream("w", tenant=bad)):
            await fed.feed(stream.batch(stored((0, [1]))))
        await fed.feed(Stream(LONGEST).batch(stored((0, [1]))))
    assert [view.stream.worker for view in fed.consumer.namespaces.views] == [LONGEST]
    assert fed.consumer.applier.dead_letters.counts.total() == 3


async def test_requests_with_bad_names_are_refused() -> None:
    decision = {"request_id": "r", "model_name": "m", "worker": "w", "token_ids": [1, 2, 3, 4]}
    registration = {"instance_id": "w", "model_name": "m", "endpoint": "tcp://127.0.0.1:1", "block_size": 4}
    async with service() as served:

        async def asked(path: str, body: dict[str, Any]) -> httpx.Response:
            return await served.client.post(path, json=body)

        assert (await asked("/decisions", decision)).is_success
        for bad in BAD.values():
            for field in ("instance_id", "model_name", *(["routing_group"] if bad else [])):  # no tenant: the default
                refused = await asked("/register", {**registration, field: bad})
                assert refused.status_code in (400, 422), (field, bad, refused.text)
            for field in ("worker", "model_name", *(["routing_group"] if bad else [])):
                refused = await asked("/decisions", {**decision, field: bad})
                assert refused.status_code in (400, 404, 422), (field, bad, refused.text)
        assert (await served.client.get("/workers")).json() == []
