"""The structs that server and clients share are complete and documented."""

from typing import Any

import httpx
import msgspec
import pytest

from kv_events.http.fleet import Fleet, DecisionFunnel, Residency
from kv_events.http.queries import PeerAnswer, RfcAnswer
from kv_events.http.service import Status
from kv_events.http.workers import RadixView, ResyncAccepted, Worker
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream, stored

TOKENS = list(range(1, 17))


@pytest.mark.parametrize(
    ("method", "path", "body", "kind"),
    [
        ("GET", "/workers", None, list[Worker]),
        ("GET", "/workers/one/view", None, RadixView),
        ("POST", "/workers/one/resync", None, ResyncAccepted),
        ("GET", "/fleet", None, Fleet),
        ("GET", "/residency", None, Residency),
        ("GET", "/funnel", None, DecisionFunnel),
        ("GET", "/health", None, Status),
        ("GET", "/ready", None, Status),
        ("POST", "/query", {"model_name": "m", "token_ids": TOKENS, "tier_weights": [1, 1, 1, 1]}, PeerAnswer),
        ("POST", "/query", {"model": "m", "block_size": 4, "token_ids": TOKENS}, RfcAnswer),
    ],
)
async def test_a_client_loses_nothing_of_an_answer(
    client: httpx.AsyncClient, fed: HandFed, method: str, path: str, body: Any, kind: type[Any]
) -> None:
    hashes = await fed.hold(Stream("one"), TOKENS)
    await fed.feed(Stream("one", model="m#mamba").batch(stored((0, hashes))))
    received = (await client.request(method, path, json=body)).content
    assert msgspec.json.encode(msgspec.json.decode(received, type=kind)) == received


async def test_the_documentation_describes_the_structs(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    schemas, paths = document["components"]["schemas"], document["paths"]
    for path, name in (("/workers/{worker}/view", "RadixView"), ("/health", "Status"), ("/ready", "Status")):
        (operation,) = paths[path].values()
        (content,) = operation["responses"]["200"]["content"].values()
        assert content["schema"] == {"$ref": f"#/components/schemas/{name}"}
    listed = paths["/workers"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert listed == {"type": "array", "items": {"$ref": "#/components/schemas/Worker"}}
    assert set(schemas["Worker"]["required"]) == set(schemas["Worker"]["properties"])
    assert "weighted" not in schemas["PeerInstance"]["required"]
    assert schemas["Worker"]["properties"]["state"]["enum"] == ["live", "syncing", "stale", "expired"]
    assert schemas["Listener"]["properties"]["counters"]["properties"]["gaps"] == {"type": "integer"}
