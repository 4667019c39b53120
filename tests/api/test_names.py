"""Names of workers, models and tenants are checked wherever they enter: 1 to 256 bytes of UTF-8."""

import logging
from typing import Any

import httpx
import pytest

from api.app import create_app
from api.service import LiveService
from api.settings import ApiSettings
from bridge import EngineSettings
from indexer.namespaces import Namespaces
from indexer.settings import IndexerSettings
from indexer.snapshots.base import SnapshotDamagedError
from indexer.snapshots.image import take, unpack
from kv_events.errors import InvalidValueError
from kv_events.runtime.words import printable
from kv_events.streams import StreamId
from publisher import PublisherSettings
from tests.rigs.api import asking
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


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_snapshot_with_a_bad_name_is_damaged(bad: str) -> None:
    for stream in (StreamId("m", "t", bad, 0), StreamId(bad, "t", "w", 0), StreamId("m", bad, "w", 0)):
        namespaces = Namespaces()
        namespaces.add_view(stream, 4)
        with pytest.raises(SnapshotDamagedError, match=r"names of 1 \.\. 256 bytes"):
            unpack(image_of(namespaces), IndexerSettings())
    namespaces = Namespaces()
    namespaces.add_view(StreamId("m", "t", LONGEST, 0), 4)
    assert [view.stream.worker for view in unpack(image_of(namespaces), IndexerSettings()).namespaces.views] == [
        LONGEST
    ]


def image_of(namespaces: Namespaces) -> bytes:
    """Return a snapshot."""
    copying = take(namespaces, {}, 0.0)
    while True:
        try:
            next(copying)
        except StopIteration as end:
            return b"".join(end.value.pack())


async def test_names_with_control_characters_and_markup_are_text_everywhere(caplog: pytest.LogCaptureFixture) -> None:
    hostile = "\x1b[31m<script>alert(1)</script>\r\nforged: line"
    caplog.set_level(logging.INFO)
    fed = HandFed()
    app = create_app(LiveService(fed.consumer, ApiSettings()))
    async with asking(app) as client:
        await fed.feed(Stream(hostile, model=hostile, tenant=hostile).batch(stored((0, [1]))))
        for path in ("/workers", "/fleet"):
            answer = await client.get(path)
            assert answer.headers["content-type"].startswith("application/json")
            assert hostile in {each.get("instance_id", each.get("worker")) for each in workers_in(answer.json())}
        metrics = (await client.get("/metrics")).text
        assert not any(line.startswith("forged") for line in metrics.split("\n"))
        unknown = await client.post("/query", json={"model_name": "x", "token_ids": [1]})
        assert unknown.headers["content-type"] == "application/problem+json"
    assert not any(record.getMessage() != printable(record.getMessage()) for record in caplog.records)


def workers_in(answer: Any) -> list[dict[str, Any]]:
    """Return the workers of either answer."""
    found: list[dict[str, Any]] = answer["workers"] if isinstance(answer, dict) else answer
    return found


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
