"""/query, /query_by_hash and /query/batch: the answers of both dialects."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from kv_events.hashing import local_hashes, namespace_seed, sequence_hashes, token_array
from tests.support.engines.event_payloads import names_of
from tests.support.http_checks import check_problem
from tests.support.log.records import Stream, removed, stored

TOKENS = list(range(1, 17))
JSON = {"content-type": "application/json"}
MSGPACK = {"content-type": "application/msgpack"}
ADDED = {"state", "age_ms", "external", "EXTERNAL", "matched_dp", "weighted", "weighted_dp"}


def without_added(answer: Any) -> Any:
    """Return the part of an answer that Dynamo's answers contain, too."""
    if isinstance(answer, dict):
        return {key: without_added(value) for key, value in answer.items() if key not in ADDED}
    return answer


def peer_query(**more: Any) -> dict[str, Any]:
    return {"model_name": "m", "token_ids": TOKENS, **more}


def rfc_query(**more: Any) -> dict[str, Any]:
    return {"model": "m", "block_size": 4, "token_ids": TOKENS, **more}


# --- Dynamo's dialect ---


async def test_the_peers_answer_for_two_workers(serving: Any) -> None:
    async with serving() as (client, fed):
        await fed.hold(Stream("1"), TOKENS)
        await fed.hold(Stream("2"), TOKENS[:8])
        answer = (await client.post("/query", json=peer_query())).json()
    assert without_added(answer) == {
        "scores": {"1": {"0": 16}, "2": {"0": 8}},
        "frequencies": [],
        "instances": {
            "1": {"longest_matched": 16, "gpu": 16, "dp": {"0": 16}, "cpu": 16, "disk": 16},
            "2": {"longest_matched": 8, "gpu": 8, "dp": {"0": 8}, "cpu": 8, "disk": 8},
        },
    }


async def test_the_peers_answer_for_two_ranks(serving: Any) -> None:
    async with serving() as (client, fed):
        await fed.hold(Stream("2"), TOKENS[:8])
        await fed.hold(Stream("2", dp_rank=1), TOKENS)
        answer = (await client.post("/query", json=peer_query())).json()
    assert without_added(answer) == {
        "scores": {"2": {"0": 8, "1": 16}},
        "frequencies": [],
        "instances": {"2": {"longest_matched": 16, "gpu": 16, "dp": {"0": 8, "1": 16}, "cpu": 16, "disk": 16}},
    }


async def test_the_peers_answer_for_lower_tiers_only(serving: Any) -> None:
    async with serving() as (client, fed):
        await fed.hold(Stream("1"), TOKENS, {1: range(1)})
        answer = (await client.post("/query", json=peer_query())).json()
    assert without_added(answer) == {
        "scores": {},
        "frequencies": [],
        "instances": {"1": {"longest_matched": 4, "gpu": 0, "dp": {"0": 0}, "cpu": 4, "disk": 4}},
    }


@pytest.mark.parametrize("tokens", [[], [9, 9, 9, 9], [1, 2, 3]], ids=["empty", "unknown", "less than a page"])
async def test_nothing_held_is_an_empty_answer(serving: Any, tokens: list[int]) -> None:
    async with serving() as (client, fed):
        await fed.hold(Stream("1"), TOKENS)
        response = await client.post("/query", json=peer_query(token_ids=tokens))
    assert (response.status_code, response.json()) == (200, {"scores": {}, "frequencies": [], "instances": {}})


@pytest.mark.parametrize(
    ("tiers", "expected"),
    [
        ({0: range(2), 1: range(6), 2: range(6), 3: range(6, 7)}, (8, 24, 28, 28)),
        ({0: range(1), 1: range(2, 3), 2: range(1, 2)}, (4, 4, 12, 12)),
        ({1: range(2)}, (0, 8, 8, 8)),
    ],
    ids=["all four", "a faster page behind a slower one", "host only"],
)
async def test_tiers_are_cumulative(serving: Any, tiers: dict[int, range], expected: tuple[int, ...]) -> None:
    tokens = list(range(100, 128))
    async with serving() as (client, fed):
        await fed.hold(Stream("1"), tokens, tiers)
        answer = (await client.post("/query", json=peer_query(token_ids=tokens))).json()["instances"]["1"]
    assert tuple(answer[key] for key in ("gpu", "cpu", "disk", "longest_matched")) == expected


async def test_added_fields_state_how_far_to_trust_an_answer(serving: Any) -> None:
    async with serving() as (client, fed):
        live, broken = Stream("1"), Stream("2")
        await fed.hold(live, TOKENS)
        await fed.hold(broken, TOKENS)
        broken.seq += 1
        await fed.feed(broken.batch(digest=bytes(64)))
        instances = (await client.post("/query", json=peer_query())).json()["instances"]
    assert {name: each["state"] for name, each in instances.items()} == {"1": "live", "2": "stale"}
    assert all(0 <= each["age_ms"] < 10_000 and each["external"] == 16 for each in instances.values())


async def test_every_block_size_of_a_model_is_asked(serving: Any) -> None:
    async with serving() as (client, fed):
        await fed.hold(Stream("small", block_size=4), TOKENS[:12])
        await fed.hold(Stream("large", block_size=8), TOKENS)
        await fed.hold(Stream("large", block_size=2, dp_rank=1), TOKENS[:10])
        answer = (await client.post("/query", json=peer_query(block_size="ignored"))).json()
    assert answer["scores"] == {"small": {"0": 12}, "large": {"0": 16, "1": 10}}
    assert answer["instances"]["large"]["gpu"] == 16


async def test_groups_are_kept_apart(serving: Any) -> None:
    async with serving() as (client, fed):
        await fed.hold(Stream("1", tenant="a"), TOKENS)
        await fed.hold(Stream("1", tenant="b"), TOKENS[:4])
        answer = (await client.post("/query", json=peer_query(routing_group="b", tenant_id="a"))).json()
    assert answer["scores"] == {"1": {"0": 4}}


@pytest.mark.parametrize("names", [{"lora_name": "ad"}, {"cache_salt": "x"}, {"lora_name": "ad", "cache_salt": "x"}])
async def test_lora_name_and_salt_enter_the_hash(serving: Any, names: dict[str, str]) -> None:
    async with serving() as (client, fed):
        await fed.hold(Stream("1"), TOKENS, **names)
        with_names = (await client.post("/query", json=peer_query(**names))).json()
        without = (await client.post("/query", json=peer_query())).json()
    assert (with_names["scores"], without["scores"]) == ({"1": {"0": 16}}, {})


# --- the RFC's dialect ---


async def test_the_rfcs_answer(serving: Any) -> None:
    async with serving() as (client, fed):
        await fed.hold(Stream("w-1"), TOKENS, {0: range(1), 1: range(1, 2), 3: range(2, 3)})
        await fed.hold(Stream("w-1", dp_rank=1), TOKENS[:4])
        answer = (await client.post("/query", json=rfc_query())).json()
    instance = answer["default"]["w-1"]
    assert instance.pop("age_ms") >= 0
    assert answer == {
        "default": {
            "w-1": {
                "longest_matched": 12,
                "GPU": 4,
                "CPU": 8,
                "DISK": 12,
                "EXTERNAL": 12,
                "DP": {"0": 4, "1": 4},
                "state": "live",
                "matched_dp": {"0": 12, "1": 4},
            }
        }
    }


@pytest.mark.parametrize("salt", ["cache_salt", "additionalsalt", "additional_salt"])
async def test_every_spelling_of_the_salt_is_taken(serving: Any, salt: str) -> None:
    async with serving() as (client, fed):
        await fed.hold(Stream("1"), TOKENS, cache_salt="x")
        answer = (await client.post("/query", json=rfc_query(**{salt: "x"}))).json()
    assert answer["default"]["1"]["GPU"] == 16


async def test_modelname_tenant_and_instance_are_heeded(serving: Any) -> None:
    body = {"modelname": "m", "block_size": 4, "token_ids": TOKENS, "tenant_id": "t", "instance_id": 2}
    async with serving() as (client, fed):
        for worker in ("1", "2"):
            await fed.hold(Stream(worker, tenant="t"), TOKENS)
        answer = (await client.post("/query", json=body)).json()
        absent = (await client.post("/query", json={**body, "instance_id": "3"})).json()
    assert list(answer) == ["t"]
    assert list(answer["t"]) == ["2"]
    assert absent == {"t": {}}


async def test_block_hash_is_the_old_name_of_seq_hashes(serving: Any) -> None:
    rolling = sequence_hashes(token_array(TOKENS), 4).tolist()
    async with serving() as (client, fed):
        await fed.hold(Stream("1"), TOKENS)
        body = {"model": "m", "block_size": 4, "block_hash": rolling}
        answer = (await client.post("/query_by_hash", json=body)).json()
        bad = await client.post("/query_by_hash", json={**body, "block_hash": [1, -1]})
    assert answer["default"]["1"]["GPU"] == 16
    assert check_problem(bad, 422)["field"] == "block_hash[1]"


@pytest.mark.parametrize("number", [7, "7"])
async def test_an_adapter_that_has_no_name_is_asked_for_by_its_number(serving: Any, number: int | str) -> None:
    async with serving() as (client, fed):
        await fed.hold(Stream("1"), TOKENS, lora_name="7")
        await fed.hold(Stream("2"), TOKENS, lora_name="ad")
        await fed.hold(Stream("3"), TOKENS)
        by_number = (await client.post("/query", json=rfc_query(lora_id=number))).json()
        by_name = (await client.post("/query", json=rfc_query(lora_id=number, lora_name="ad"))).json()
        plain = [(await client.post("/query", json=rfc_query(lora_id=none))).json() for none in (None, 0, "")]
    assert list(by_number["default"]) == ["1"]
    assert by_number["default"]["1"]["GPU"] == 16
    assert list(by_name["default"]) == ["2"]
    assert [list(answer["default"]) for answer in plain] == [["3"]] * 3


# --- hashes, packed numbers, weights, batches ---


async def test_rolling_and_local_hashes_give_the_answer_of_the_tokens(serving: Any) -> None:
    tokens = token_array(TOKENS)
    rolling = sequence_hashes(tokens, 4).tolist()
    local = local_hashes(tokens, 4).view(np.int64).tolist()
    async with serving() as (client, fed):
        await fed.hold(Stream("1"), TOKENS)
        for hashes in ({"seq_hashes": rolling}, {"block_hashes": local}):
            answer = (await client.post("/query_by_hash", json={"model_name": "m", **hashes})).json()
            assert answer["scores"] == {"1": {"0": 16}}
            body = {"model": "m", "block_size": 4, **hashes}
            assert (await client.post("/query_by_hash", json=body)).json()["default"]["1"]["GPU"] == 16


@pytest.mark.parametrize(("lora", "salt"), [("ad", None), (None, "s"), ("ad", "s")])
async def test_local_hashes_alone_find_the_pages_of_any_namespace(
    serving: Any, lora: str | None, salt: str | None
) -> None:
    local = local_hashes(token_array(TOKENS), 4, namespace_seed(lora, salt)).view(np.int64).tolist()
    async with serving() as (client, fed):
        await fed.feed(Stream("1").batch(stored((0, names_of(TOKENS, lora=lora, salt=salt)))))
        by_tokens = (await client.post("/query", json=peer_query(lora_name=lora, cache_salt=salt))).json()
        by_hash = (await client.post("/query_by_hash", json={"model_name": "m", "block_hashes": local})).json()
    assert by_tokens["scores"] == by_hash["scores"] == {"1": {"0": 16}}


async def test_an_adapters_name_beside_hashes_changes_nothing(serving: Any) -> None:
    local = local_hashes(token_array(TOKENS), 4, namespace_seed("ad")).view(np.int64).tolist()
    async with serving() as (client, fed):
        rolled = await fed.hold(Stream("1"), TOKENS, lora_name="ad")
        for prompt in ({"block_hashes": local}, {"seq_hashes": rolled}, {"block_hash": rolled}):
            for name in ({}, {"lora_name": "ad"}, {"lora_name": "another"}, {"lora_id": 7}):
                body = {"model": "m", "block_size": 4, **prompt, **name}
                assert (await client.post("/query_by_hash", json=body)).json()["default"]["1"]["GPU"] == 16


@pytest.mark.parametrize("content_type", ["application/msgpack", "application/x-msgpack"])
async def test_msgpack_takes_lists_and_packed_numbers(serving: Any, content_type: str) -> None:
    tokens = token_array(TOKENS)
    rolling = sequence_hashes(tokens, 4)
    questions: list[tuple[str, dict[str, Any]]] = [
        ("/query", {"token_ids": TOKENS}),
        ("/query", {"token_ids": tokens.tobytes()}),
        ("/query_by_hash", {"seq_hashes": rolling.tolist()}),
        ("/query_by_hash", {"seq_hashes": rolling.tobytes()}),
        ("/query_by_hash", {"block_hashes": local_hashes(tokens, 4).tobytes()}),
    ]
    async with serving() as (client, fed):
        await fed.hold(Stream("1"), TOKENS)
        for path, fields in questions:
            body = msgspec.msgpack.encode({"model_name": "m", **fields})
            response = await client.post(path, content=body, headers={"content-type": content_type})
            assert response.json()["scores"] == {"1": {"0": 16}}


@pytest.mark.parametrize(
    ("weights", "expected"),
    [([1, 0.5, 0.25, 0.125], 4 + 2 + 1 + 0.5), ({"gpu": 1, "DISK": 0.5}, 4 + 2)],
    ids=["list", "by name"],
)
async def test_tier_weights_give_one_number(serving: Any, weights: Any, expected: float) -> None:
    async with serving() as (client, fed):
        await fed.hold(Stream("1"), TOKENS, {tier: range(tier, tier + 1) for tier in range(4)})
        peer = (await client.post("/query", json=peer_query(tier_weights=weights))).json()
        rfc = (await client.post("/query", json=rfc_query(tier_weights=weights))).json()
    assert peer["instances"]["1"]["weighted"] == rfc["default"]["1"]["weighted"] == expected


async def test_a_batch_answers_each_query_in_its_place(serving: Any) -> None:
    rolling = sequence_hashes(token_array(TOKENS), 4).tolist()
    queries = [peer_query(), {"model_name": "nope", "token_ids": []}, rfc_query(), {"model_name": "m"}, 7]
    queries.append({"model_name": "m", "seq_hashes": rolling[:2]})
    async with serving() as (client, fed):
        await fed.hold(Stream("1"), TOKENS)
        for body, headers in ((msgspec.json.encode, JSON), (msgspec.msgpack.encode, MSGPACK)):
            response = await client.post("/query/batch", content=body({"queries": queries}), headers=headers)
            results = response.json()["results"]
            assert results[0]["scores"] == {"1": {"0": 16}}
            assert results[2]["default"]["1"]["GPU"] == 16
            assert results[5]["scores"] == {"1": {"0": 8}}
            assert [results[i]["status"] for i in (1, 3, 4)] == [404, 422, 422]


async def test_removed_pages_no_longer_count(serving: Any) -> None:
    async with serving() as (client, fed):
        stream = Stream("1")
        hashes = await fed.hold(stream, TOKENS)
        await fed.feed(stream.batch(removed(hashes[2:])), stream.batch(stored((0, [77]))))
        answer = (await client.post("/query", json=peer_query())).json()
    assert answer["scores"] == {"1": {"0": 8}}
