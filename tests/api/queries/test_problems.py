"""Errors of callers: Dynamo's status, a problem document with the field and value, and never a 5xx."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from httpx import AsyncClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.effort import num_examples
from tests.support.http_checks import check_problem
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream

TOKENS = list(range(1, 17))
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("fields", "field", "detail"),
    [
        (
            {"token_ids": [1, 2, 3, -1]},
            "token_ids[3]",
            "token_ids[3]: got -1, expected an integer in 0 .. 4294967295",
        ),
        ({"token_ids": [2**32]}, "token_ids[0]", "token_ids[0]: got 4294967296, expected an integer in"),
        ({"token_ids": [10**30]}, "token_ids[0]", "expected an integer in 0 .. 4294967295"),
        ({"token_ids": [1, 1.5]}, "token_ids[1]", "token_ids[1]: got 1.5, expected an integer in"),
        ({"token_ids": [1, 2.0]}, "token_ids[1]", "token_ids[1]: got 2.0, expected an integer in"),
        ({"token_ids": [True]}, "token_ids[0]", "token_ids[0]: got True, expected an integer in"),
        ({"token_ids": [None]}, "token_ids[0]", "token_ids[0]: got None, expected an integer in"),
        ({"token_ids": "abcd"}, "token_ids", "token_ids: got 'abcd', expected array"),
        ({"token_ids": None}, "token_ids", "token_ids: got None, expected array"),
        ({}, "token_ids", "token_ids: missing"),
        ({"token_ids": [], "lora_name": 5}, "lora_name", "lora_name: got 5, expected str | null"),
        ({"token_ids": [], "routing_group": []}, "routing_group", "routing_group: got [], expected str | null"),
        ({"token_ids": [], "tier_weights": [1, 2]}, "tier_weights", "tier_weights: got [1, 2], expected array of"),
        (
            {"token_ids": [], "tier_weights": [1, 2, 3, -4]},
            "tier_weights.external",
            "tier_weights.external: got -4.0, expected a number in 0 .. 1000000",
        ),
        ({"token_ids": [], "tier_weights": {"tape": 1}}, "tier_weights", "tier_weights: got 'tape', expected names"),
        ({"model_name": 7, "token_ids": []}, "model_name", "model_name: got 7, expected str"),
    ],
)
async def test_a_bad_field_is_named_with_its_value(
    client: AsyncClient, fed: HandFed, fields: dict[str, Any], field: str, detail: str
) -> None:
    await fed.hold(Stream("1"), TOKENS)
    problem = check_problem(await client.post("/query", json={"model_name": "m", **fields}), 422)
    assert problem["field"] == field
    assert detail in problem["detail"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "seq_hashes|block_hashes"),
        ({"seq_hashes": [-1]}, "seq_hashes[0]"),
        ({"seq_hashes": [0, 2**64]}, "seq_hashes[1]"),
        ({"block_hashes": [2**63]}, "block_hashes[0]"),
        ({"block_hashes": [0, -(2**63) - 1]}, "block_hashes[1]"),
        ({"seq_hashes": [1], "block_hashes": [1]}, "block_hashes"),
    ],
)
async def test_a_bad_hash_is_named(client: AsyncClient, fed: HandFed, fields: dict[str, Any], field: str) -> None:
    await fed.hold(Stream("1"), TOKENS)
    problem = check_problem(await client.post("/query_by_hash", json={"model_name": "m", **fields}), 422)
    assert problem["field"] == field


async def test_packed_numbers_have_a_whole_number_of_elements(client: AsyncClient) -> None:
    body = msgspec.msgpack.encode({"model_name": "m", "token_ids": b"12345"})
    response = await client.post("/query", content=body, headers={"content-type": "application/msgpack"})
    problem = check_problem(response, 422)
    assert (problem["field"], problem["value"]) == ("token_ids", "5 bytes")


async def test_an_unknown_model_names_the_known_ones(client: AsyncClient, fed: HandFed) -> None:
    await fed.hold(Stream("1"), TOKENS)
    peer = check_problem(await client.post("/query", json={"model_name": "nope", "token_ids": []}), 404)
    rfc = {"model": "m", "tenant_id": "t", "block_size": 4, "token_ids": []}
    other = check_problem(await client.post("/query", json=rfc), 404)
    assert peer["error"].startswith("no indexer for model=nope routing_group=default")
    assert "m (routing_group=default)" in peer["detail"]
    assert (peer["field"], peer["value"]) == ("model_name", "nope")
    assert "tenant_id=t" in other["detail"]


async def test_another_block_size_is_refused_naming_both(client: AsyncClient, fed: HandFed) -> None:
    await fed.hold(Stream("1"), TOKENS)
    body = {"model": "m", "block_size": 8, "token_ids": TOKENS}
    problem = check_problem(await client.post("/query", json=body), 400)
    missing = check_problem(await client.post("/query", json={"model": "m", "token_ids": []}), 422)
    assert (problem["field"], problem["value"]) == ("block_size", 8)
    assert "got 8, expected 4" in problem["detail"]
    assert missing["field"] == "block_size"


async def test_a_query_without_a_model_reports_it(client: AsyncClient) -> None:
    body = {"token_ids": [], "block_size": 4}
    assert check_problem(await client.post("/query", json=body), 422)["field"] == "model_name"


async def test_a_salt_with_local_hashes_is_refused(client: AsyncClient, fed: HandFed) -> None:
    await fed.hold(Stream("1"), TOKENS)
    body = {"model_name": "m", "block_hashes": [1], "cache_salt": "x"}
    problem = check_problem(await client.post("/query_by_hash", json=body), 400)
    accepted = await client.post("/query_by_hash", json={"model_name": "m", "seq_hashes": [1], "cache_salt": "x"})
    assert problem["field"] == "cache_salt"
    assert accepted.status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff",
        b'{"model_name":"\xff"}',
        b'{"model_name":"\\ud800"}',
        b'{"a":1} x',
        b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    ],
)
@pytest.mark.parametrize("path", ["/query", "/query_by_hash"])
async def test_a_malformed_body_is_a_400(client: AsyncClient, path: str, body: bytes) -> None:
    check_problem(await client.post(path, content=body, headers=JSON), 400)


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/json2", ""])
async def test_another_content_type_is_a_415(client: AsyncClient, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    check_problem(await client.post("/query", content=b"{}", headers=headers), 415)


async def test_a_content_type_may_have_parameters(client: AsyncClient, fed: HandFed) -> None:
    await fed.hold(Stream("1"), TOKENS)
    body = b'{"model_name":"m","token_ids":[]}'
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert (await client.post("/query", content=body, headers=headers)).status_code == 200


async def test_wrong_methods_and_paths_are_problems(client: AsyncClient) -> None:
    assert check_problem(await client.get("/query"), 405)["detail"] == "GET is not supported here"
    check_problem(await client.post("/workers"), 405)
    check_problem(await client.get("/no/such"), 404)
    assert "/no/such" in check_problem(await client.post("/no/such"), 404)["detail"]


async def test_a_body_over_the_limit_is_refused_as_announced(serving: Any) -> None:
    async with serving(max_body_bytes=1024) as (client, _):
        problem = check_problem(await client.post("/query", content=b" " * 1025, headers=JSON), 413)
    assert "1024 bytes" in problem["detail"]


async def test_a_body_without_a_length_is_read_no_further_than_the_limit(serving: Any) -> None:
    taken = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal taken
        while True:
            taken += 512
            yield b" " * 512

    async with serving(max_body_bytes=1024) as (client, _):
        check_problem(await client.post("/query", content=endless(), headers=JSON), 413)
    assert taken <= 2048


async def test_a_batch_has_a_bound(client: AsyncClient) -> None:
    problem = check_problem(await client.post("/query/batch", json={"queries": [1] * 1025}), 422)
    check_problem(await client.post("/query/batch", json={"queries": 5}), 422)
    check_problem(await client.post("/query/batch", content=b'{"queries":[', headers=JSON), 400)
    assert "1025" in problem["detail"]


async def test_more_hashes_than_the_limit_are_refused(client: AsyncClient) -> None:
    body = {"model_name": "m", "seq_hashes": bytes(8 * 262_145)}
    data = msgspec.msgpack.encode(body)
    response = await client.post("/query_by_hash", content=data, headers={"content-type": "application/msgpack"})
    assert "262145" in check_problem(response, 422)["detail"]


async def test_a_long_value_is_shortened(client: AsyncClient) -> None:
    problem = check_problem(await client.post("/query", json={"model_name": "m", "token_ids": "x" * 9999}), 422)
    assert len(json.dumps(problem)) < 1000


@pytest.mark.parametrize("depth", [500, 900, 960, 985, 2000])
async def test_a_nested_value_gives_no_5xx_whatever_its_depth(client: AsyncClient, fed: HandFed, depth: int) -> None:
    nested = b"[" * depth + b"]" * depth
    bodies = [
        b'{"model_name":"m","token_ids":%s}',
        b'{"model_name":"m","token_ids":[],"lora_name":%s}',
        b'{"queries":%s}',
    ]
    await fed.hold(Stream("1"), TOKENS)
    for path in ("/query", "/query/batch"):
        for body in bodies:
            response = await client.post(path, content=body % nested, headers=JSON)
            assert response.status_code < 500, response.text


@pytest.mark.parametrize("value", [list(range(20_000)), {str(n): n for n in range(9000)}, [["x" * 9999]]])
async def test_a_large_value_is_named_and_not_repeated(client: AsyncClient, value: Any) -> None:
    body = {"model_name": "m", "token_ids": [], "lora_name": value}
    problem = check_problem(await client.post("/query", json=body), 422)
    assert problem["field"] == "lora_name"
    assert f"{type(value).__name__} of length {len(value)}" in problem["detail"]
    assert len(json.dumps(problem)) < 1000


NUMBERS = st.one_of(st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=3), st.just([]))
VALUES = st.recursive(
    NUMBERS | st.binary(max_size=9) | st.sampled_from(["m", "default"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
NAMES = ["model_name", "model", "modelname", "token_ids", "seq_hashes", "block_hashes", "block_size", "tenant_id"]
NAMES += ["routing_group", "instance_id", "lora_name", "cache_salt", "additionalsalt", "tier_weights", "queries"]
BODIES = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6)


@settings(max_examples=num_examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    queries=st.lists(BODIES | VALUES, max_size=8),
    noise=st.binary(max_size=40),
    path=st.sampled_from(["/query", "/query_by_hash"]),
)
async def test_nothing_a_caller_sends_gives_a_5xx(
    client: AsyncClient, fed: HandFed, queries: list[Any], noise: bytes, path: str
) -> None:
    await fed.hold(Stream("1"), TOKENS)
    for content_type, encode in (("application/json", _json), ("application/msgpack", _msgpack)):
        headers = {"content-type": content_type}
        for query in queries:
            for data in (encode(query), encode(query)[:-1], encode(query) + noise, noise):
                assert (await client.post(path, content=data, headers=headers)).status_code < 500
        batch = encode({"queries": queries})
        assert (await client.post("/query/batch", content=batch, headers=headers)).status_code < 500


def _json(value: Any) -> bytes:
    return json.dumps(value, default=lambda data: data.hex()).encode()


def _msgpack(value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError):  # has no msgpack form
        return b"\xc1"
