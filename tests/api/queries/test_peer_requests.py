"""NVIDIA Dynamo's indexer and kvsight answer the same requests with the same statuses and error messages."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.rigs.api import embedded
from tests.support.servers.child_process import free_port
from tests.support.servers.peer_indexer import PeerIndexer

JSON = {"content-type": "application/json"}
ENGINE = {"instance_id": 1, "endpoint": f"tcp://127.0.0.1:{free_port()}", "model_name": "m", "block_size": 4}
QUERY = {"model_name": "m", "token_ids": [1, 2, 3, 4]}


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[PeerIndexer]:
    with PeerIndexer(tmp_path / "peer.log") as running:
        yield running


def without(field: str) -> dict[str, Any]:
    return {name: value for name, value in ENGINE.items() if name != field}


def error_of(response: httpx.Response) -> str | None:
    """Return the field `error` of a rejection, or None for another answer."""
    if "json" not in response.headers.get("content-type", ""):
        return None
    body = response.json()
    return body.get("error") if isinstance(body, dict) else None


EQUAL: list[tuple[str, str, Any]] = [
    ("POST", "/register", {**ENGINE, "endpoint": "tcp://127.0.0.1:1"}),
    ("POST", "/register", {**ENGINE, "instance_id": 2, "block_size": 8}),
    ("POST", "/register", {**ENGINE, "dp_rank": 1, "model_name": "other"}),
    ("POST", "/register", {**ENGINE, "instance_id": 3, "endpoint": "bad"}),
    ("POST", "/register", {**ENGINE, "instance_id": 4, "unknown": [1], "tenant_id": "t", "additional_salt": "s"}),
    *(("POST", "/register", without(field)) for field in ("instance_id", "endpoint", "model_name")),
    ("POST", "/register", {**ENGINE, "instance_id": 5, "block_size": "4"}),
    ("POST", "/register", {**ENGINE, "instance_id": 5, "dp_rank": -1}),
    ("POST", "/register", {**ENGINE, "instance_id": True}),
    ("POST", "/register", {**ENGINE, "instance_id": 1.5}),
    ("POST", "/unregister", {"instance_id": 9, "model_name": "m"}),
    ("POST", "/unregister", {"instance_id": 1, "model_name": "nope"}),
    ("POST", "/unregister", {"instance_id": 1}),
    ("POST", "/query", QUERY),
    ("POST", "/query", {**QUERY, "token_ids": []}),
    ("POST", "/query", {**QUERY, "token_ids": [2**32]}),
    ("POST", "/query", {**QUERY, "token_ids": [-1]}),
    ("POST", "/query", {**QUERY, "token_ids": [1.5]}),
    ("POST", "/query", {**QUERY, "token_ids": [True]}),
    ("POST", "/query", {**QUERY, "token_ids": "1234"}),
    ("POST", "/query", {"model_name": "m"}),
    ("POST", "/query", b"{"),
    ("POST", "/query_by_hash", {"model_name": "m", "block_hashes": [1, -1]}),
    ("POST", "/query_by_hash", {"model_name": "m", "block_hashes": [2**63]}),
    ("GET", "/health", None),
    ("GET", "/workers?model_name=nope", None),
    ("GET", "/query", None),
    ("PUT", "/workers", None),
    ("GET", "/nowhere", None),
]
"""Send to both after `ENGINE` is registered."""


async def both_say(peer: PeerIndexer, client: httpx.AsyncClient, method: str, path: str, body: Any) -> list[Any]:
    """Return (status, `error`) of the peer and of kvsight."""
    content = body if isinstance(body, bytes) else httpx.Request("POST", "http://t", json=body).content
    request: dict[str, Any] = {} if body is None else {"content": content, "headers": JSON}
    theirs = await asyncio.to_thread(peer.request, method, path, **request)
    answers = [theirs, await client.request(method, path, **request)]
    return [(answer.status_code, error_of(answer)) for answer in answers]


async def test_what_the_peer_answers_we_answer_and_what_it_refuses_we_refuse_in_its_words(peer: PeerIndexer) -> None:
    async with embedded() as client:
        assert await both_say(peer, client, "POST", "/register", ENGINE) == [(201, None)] * 2
        differences = []
        for request in EQUAL:
            theirs, said = await both_say(peer, client, *request)
            if said[0] != theirs[0] or theirs[1] not in (None, said[1]):
                differences.append((request, theirs, said))
        assert differences == []
        for instance in (1, 4):
            gone = {"instance_id": instance, "model_name": "m"}
            assert await both_say(peer, client, "POST", "/unregister", gone) == [(200, None)] * 2


async def test_where_we_differ_is_what_the_documentation_states(peer: PeerIndexer) -> None:
    engine = {**ENGINE, "model_name": "other"}
    async with embedded() as client:
        assert await both_say(peer, client, "POST", "/register", engine) == [(201, None)] * 2
        again = await both_say(peer, client, "POST", "/register", engine)
        assert again == [(409, "instance 1 dp_rank 0 already registered"), (200, None)]
        (status, _), (ours_status, said) = await both_say(
            peer, client, "POST", "/register", {**ENGINE, "instance_id": 6, "model_name": "third", "block_size": 0}
        )
        assert (status, ours_status) == (201, 422)
        assert said is not None
        assert re.match("block_size", said)
        text = {**engine, "instance_id": "7"}
        assert [status for status, _ in await both_say(peer, client, "POST", "/register", text)] == [422, 201]
        learned = {**without("block_size"), "instance_id": 8, "model_name": "other"}
        assert [status for status, _ in await both_say(peer, client, "POST", "/register", learned)] == [422, 201]
        unknown = {"model_name": "nope", "token_ids": []}
        (status, words), (ours_status, said) = await both_say(peer, client, "POST", "/query", unknown)
        assert (status, ours_status) == (404, 404)
        assert words is not None
        assert said is not None
        assert said.startswith(words)  # kvsight also lists the known models
        salted = {"model_name": "other", "block_hashes": [1], "cache_salt": "s"}
        (status, words), (ours_status, said) = await both_say(peer, client, "POST", "/query_by_hash", salted)
        assert (status, ours_status) == (400, 400)
        rank = {"instance_id": 1, "model_name": "other", "dp_rank": 5}
        assert [status for status, _ in await both_say(peer, client, "POST", "/unregister", rank)] == [200, 404]
