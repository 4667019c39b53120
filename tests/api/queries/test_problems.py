"""Errors of callers: Dynamo's status, a problem document with the field and value, and never a 5xx."""

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


Refusal = tuple[dict[str, Any], int, str | None, str]
"""Fields, and the status, field and words of their problem."""
HUGE = 10**30
UINT32, INT64 = "an integer in 0 .. 4294967295", "an integer in -9223372036854775808 .. 9223372036854775807"
PEER: list[Refusal] = [
    ({"token_ids": [1, 2, 3, -1]}, 422, "token_ids[3]", f"token_ids[3]: got -1, expected {UINT32}"),
    ({"token_ids": [2**32]}, 422, "token_ids[0]", f"token_ids[0]: got 4294967296, expected {UINT32}"),
    ({"token_ids": [HUGE]}, 422, "token_ids[0]", UINT32),
    ({"token_ids": [1, 1.5]}, 422, "token_ids[1]", f"token_ids[1]: got 1.5, expected {UINT32}"),
    ({"token_ids": [1, 2.0]}, 422, "token_ids[1]", f"token_ids[1]: got 2.0, expected {UINT32}"),
    ({"token_ids": [True]}, 422, "token_ids[0]", f"token_ids[0]: got True, expected {UINT32}"),
    ({"token_ids": [None]}, 422, "token_ids[0]", f"token_ids[0]: got None, expected {UINT32}"),
    ({"token_ids": "abcd"}, 422, "token_ids", "token_ids: got 'abcd', expected array"),
    ({"token_ids": None}, 422, "token_ids", "token_ids: got None, expected array"),
    ({}, 422, "token_ids", "token_ids: missing"),
    ({"token_ids": [], "lora_name": 5}, 422, "lora_name", "lora_name: got 5, expected str | null"),
    ({"token_ids": [], "routing_group": []}, 422, "routing_group", "routing_group: got [], expected str | null"),
    ({"token_ids": [], "tier_weights": [1, 2]}, 422, "tier_weights", "tier_weights: got [1, 2], expected array of"),
    (
        {"token_ids": [], "tier_weights": [1, 2, 3, -4]},
        *(422, "tier_weights.external", "tier_weights.external: got -4.0, expected a number in 0 .. 1000000"),
    ),
    ({"token_ids": [], "tier_weights": {"tape": 1}}, 422, "tier_weights", "tier_weights: got 'tape', expected names"),
    ({"model_name": 7, "token_ids": []}, 422, "model_name", "model_name: got 7, expected str"),
    (
        {"model_name": "x", "token_ids": []},
        404,
        "model_name",
        "no indexer for model=x routing_group=default; known: m (",
    ),
]
BY_HASH: list[Refusal] = [
    ({}, 422, "seq_hashes|block_hashes", "missing"),
    ({"seq_hashes": [-1]}, 422, "seq_hashes[0]", "got -1"),
    ({"seq_hashes": [0, 2**64]}, 422, "seq_hashes[1]", "18446744073709551615"),
    ({"block_hashes": [2**63]}, 422, "block_hashes[0]", INT64),
    ({"block_hashes": [0, -(2**63) - 1]}, 422, "block_hashes[1]", INT64),
    ({"seq_hashes": [1], "block_hashes": [1]}, 422, "block_hashes", "only one"),
    ({"block_hashes": [1], "cache_salt": "x"}, 400, "cache_salt", "already contain it"),
]
RFC: list[Refusal] = [
    ({"tenant_id": "t", "block_size": 4}, 404, "model", "tenant_id=t"),
    ({"block_size": 8}, 400, "block_size", "got 8, expected 4"),
    ({}, 422, "block_size", "missing"),
    ({"model": None, "block_size": 4}, 422, "model", "got None"),
]
CASES: list[tuple[str, dict[str, Any], int, str | None, str]] = [
    *(("/query", {"model_name": "m", **case[0]}, *case[1:]) for case in PEER),
    *(("/query_by_hash", {"model_name": "m", **case[0]}, *case[1:]) for case in BY_HASH),
    *(("/query", {"model": "m", "token_ids": [], **case[0]}, *case[1:]) for case in RFC),
    ("/query", {"token_ids": []}, 422, "model_name", "model_name: missing (or model, in the RFC's dialect)"),
    ("/query/batch", {"queries": [1] * 1025}, 422, None, "1025"),
    ("/query/batch", {"queries": 5}, 422, "queries", "got 5"),
]


async def test_a_refusal_names_the_field_and_its_value(client: AsyncClient, fed: HandFed) -> None:
    await fed.hold(Stream("1"), TOKENS)
    for path, body, status, field, words in CASES:
        problem = check_problem(await client.post(path, json=body), status)
        assert field in (None, problem["field"]), (body, problem)
        assert words in problem["detail"], (body, problem)
    accepted = {"model_name": "m", "seq_hashes": [1], "cache_salt": "x"}
    assert (await client.post("/query_by_hash", json=accepted)).status_code == 200


@pytest.mark.parametrize(
    ("path", "prompt", "value"),
    [("/query", {"token_ids": b"12345"}, "5 bytes"), ("/query_by_hash", {"seq_hashes": bytes(8 * 262_145)}, "262145")],
)
async def test_packed_numbers_have_bounds(client: AsyncClient, path: str, prompt: Any, value: str) -> None:
    body = msgspec.msgpack.encode({"model_name": "m", **prompt})
    response = await client.post(path, content=body, headers={"content-type": "application/msgpack"})
    assert value in check_problem(response, 422)["detail"]


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
async def test_a_malformed_body_is_a_400(client: AsyncClient, body: bytes) -> None:
    for path in ("/query", "/query_by_hash"):
        problem = check_problem(await client.post(path, content=body, headers=JSON), 400)
        assert (problem["detail"] == "body: it is empty") == (not body)


async def test_content_types_are_json_and_msgpack(client: AsyncClient, fed: HandFed) -> None:
    for wrong in ({}, *({"content-type": each} for each in ("text/plain", "application/json2", ""))):
        check_problem(await client.post("/query", content=b"{}", headers=wrong), 415)
    await fed.hold(Stream("1"), TOKENS)
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    body = b'{"model_name":"m","token_ids":[]}'
    assert (await client.post("/query", content=body, headers=headers)).status_code == 200


async def test_wrong_methods_and_paths_are_problems(client: AsyncClient) -> None:
    assert check_problem(await client.get("/query"), 405)["detail"] == "GET is not supported here"
    check_problem(await client.post("/fleet"), 405)
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


@pytest.mark.parametrize("value", ["x" * 9999, [*range(20_000)], {str(n): n for n in range(9000)}, [["x" * 9999]]])
async def test_a_large_value_is_named_and_not_repeated(client: AsyncClient, value: Any) -> None:
    field = "token_ids" if isinstance(value, str) else "lora_name"
    body = {"model_name": "m", "token_ids": [], field: value}
    problem = check_problem(await client.post("/query", json=body), 422)
    assert problem["field"] == field
    assert isinstance(value, str) or f"{type(value).__name__} of length {len(value)}" in problem["detail"]
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
