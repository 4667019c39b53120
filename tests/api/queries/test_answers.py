"""The answers of both dialects, and group streams over HTTP."""

from typing import Any

import msgspec
import numpy as np
import pytest
from httpx import AsyncClient

from kv_events.hashing import local_hashes, namespace_seed, sequence_hashes, token_array
from tests.support.http_checks import check_problem
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream, stored

TOKENS = list(range(1, 17))
LONG = list(range(100, 128))
ROLLING = sequence_hashes(token_array(TOKENS), 4)
LOCAL = local_hashes(token_array(TOKENS), 4)
HASHES = {"seq_hashes", "block_hashes", "block_hash"}
MSGPACK = "application/msgpack"
ADDED = {"state", "age_ms", "external", "EXTERNAL", "matched_dp", "weighted", "weighted_dp", "hint"}
Held = list[tuple[str, dict[str, Any], list[int], dict[int, range] | None]]


async def ask(client: AsyncClient, path: str = "/query", **body: Any) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def peer(**more: Any) -> dict[str, Any]:
    return {"model_name": "m", **(more if more.keys() & HASHES else {"token_ids": TOKENS, **more})}


def rfc(**more: Any) -> dict[str, Any]:
    return {"model": "m", "block_size": 4, **(more if more.keys() & HASHES else {"token_ids": TOKENS, **more})}


def instance(gpu: int, cpu: int, disk: int, dp: dict[str, int]) -> dict[str, Any]:
    return {"longest_matched": disk, "gpu": gpu, "dp": dp, "cpu": cpu, "disk": disk}


def without_added(answer: Any) -> Any:
    """Return the part of an answer that Dynamo's answers contain, too."""
    if isinstance(answer, dict):
        return {key: without_added(value) for key, value in answer.items() if key not in ADDED}
    return answer


@pytest.mark.parametrize(
    ("held", "query", "scores", "instances"),
    [
        (
            [("1", {}, TOKENS, None), ("2", {}, TOKENS[:8], None)],
            {},
            {"1": {"0": 16}, "2": {"0": 8}},
            {"1": instance(16, 16, 16, {"0": 16}), "2": instance(8, 8, 8, {"0": 8})},
        ),
        (
            [("2", {}, TOKENS[:8], None), ("2", {"dp_rank": 1}, TOKENS, None)],
            {},
            {"2": {"0": 8, "1": 16}},
            {"2": instance(16, 16, 16, {"0": 8, "1": 16})},
        ),
        ([("1", {}, TOKENS, {1: range(1)})], {}, {}, {"1": instance(0, 4, 4, {"0": 0})}),
        *(([("1", {}, TOKENS, None)], {"token_ids": none}, {}, {}) for none in ([], [9, 9, 9, 9], [1, 2, 3])),
        (
            [("1", {}, LONG, {0: range(2), 1: range(6), 2: range(6), 3: range(6, 7)})],
            {"token_ids": LONG},
            {"1": {"0": 8}},
            {"1": instance(8, 24, 28, {"0": 8})},
        ),
        (
            [("1", {}, LONG, {0: range(1), 1: range(2, 3), 2: range(1, 2)})],  # a faster page behind a slower one
            {"token_ids": LONG},
            {"1": {"0": 4}},
            {"1": instance(4, 4, 12, {"0": 4})},
        ),
        (
            [
                ("small", {"block_size": 4}, TOKENS[:12], None),
                ("large", {"block_size": 8}, TOKENS, None),
                ("large", {"block_size": 2, "dp_rank": 1}, TOKENS[:10], None),
            ],
            {"block_size": "ignored"},
            {"small": {"0": 12}, "large": {"0": 16, "1": 10}},
            {"small": instance(12, 12, 12, {"0": 12}), "large": instance(16, 16, 16, {"0": 16, "1": 10})},
        ),
        (
            [("1", {"tenant": "a"}, TOKENS, None), ("1", {"tenant": "b"}, TOKENS[:4], None)],
            {"routing_group": "b", "tenant_id": "a"},
            {"1": {"0": 4}},
            {"1": instance(4, 4, 4, {"0": 4})},
        ),
    ],
)
async def test_the_peers_answer(
    client: AsyncClient, fed: HandFed, held: Held, query: dict[str, Any], scores: Any, instances: Any
) -> None:
    for worker, stream, tokens, tiers in held:
        await fed.hold(Stream(worker, **stream), tokens, tiers)
    answer = without_added(await ask(client, **peer(**query)))
    assert answer == {"scores": scores, "frequencies": [], "instances": instances}


async def test_added_fields_state_how_far_to_trust_an_answer(client: AsyncClient, fed: HandFed) -> None:
    live, broken = Stream("1"), Stream("2")
    await fed.hold(live, TOKENS)
    await fed.hold(broken, TOKENS)
    broken.seq += 1
    await fed.feed(broken.batch(digest=bytes(64)))
    instances = (await ask(client, **peer()))["instances"]
    assert {name: each["state"] for name, each in instances.items()} == {"1": "live", "2": "stale"}
    assert all(0 <= each["age_ms"] < 10_000 and each["external"] == 16 for each in instances.values())


@pytest.mark.parametrize("has_groups", [False, True])
@pytest.mark.parametrize(
    ("query", "hint"),
    [
        ({"token_ids": [1, 2, 3]}, "3 tokens: less than one page of 4"),
        ({"token_ids": [1, 2, 3, 4], "is_eagle": True}, "3 token pairs: less than one page of 4"),
        ({"token_ids": [9, 9, 9, 9]}, None),
        ({"seq_hashes": [1]}, None),
    ],
)
async def test_a_prompt_shorter_than_a_page_gets_a_hint(
    client: AsyncClient, fed: HandFed, query: dict[str, Any], hint: str | None, has_groups: bool
) -> None:
    await (hold_with_a_state(fed, 0) if has_groups else fed.hold(Stream("1"), TOKENS))
    path = "/query_by_hash" if "seq_hashes" in query else "/query"
    assert (await ask(client, path, **peer(**query))).get("hint") == hint


async def test_the_rfcs_answer(client: AsyncClient, fed: HandFed) -> None:
    await fed.hold(Stream("w-1"), TOKENS, {0: range(1), 1: range(1, 2), 3: range(2, 3)})
    await fed.hold(Stream("w-1", dp_rank=1), TOKENS[:4])
    answer = await ask(client, **rfc())
    assert answer["default"]["w-1"].pop("age_ms") >= 0
    tiers = {"GPU": 4, "CPU": 8, "DISK": 12, "EXTERNAL": 12, "DP": {"0": 4, "1": 4}}
    found = {"longest_matched": 12, **tiers, "state": "live", "matched_dp": {"0": 12, "1": 4}}
    assert answer == {"default": {"w-1": found}}


async def test_modelname_tenant_and_instance_are_heeded(client: AsyncClient, fed: HandFed) -> None:
    body: dict[str, Any] = {"modelname": "m", "block_size": 4, "token_ids": TOKENS, "tenant_id": "t"}
    for worker in ("1", "2"):
        await fed.hold(Stream(worker, tenant="t"), TOKENS)
    for named, found in ((2, {"2"}), ("3", set()), (None, {"1", "2"})):
        answer = await ask(client, **body, instance_id=named)
        assert (list(answer), answer["t"].keys()) == (["t"], found)


@pytest.mark.parametrize(("query", "path"), [(peer, "instances"), (rfc, "default")], ids=["peer", "rfc"])
async def test_ranks_are_distinguished_on_every_tier(client: AsyncClient, fed: HandFed, query: Any, path: str) -> None:
    await fed.hold(Stream("w"), TOKENS, {0: range(3)})
    await fed.hold(Stream("w", dp_rank=1), TOKENS, {0: range(1), 1: range(1, 4)})
    await fed.hold(Stream("alike"), TOKENS)
    plain = (await ask(client, **query()))[path]
    weighed = (await ask(client, **query(tier_weights=[1, 0.5, 0, 0])))[path]
    assert (plain["w"]["longest_matched"], plain["w"]["matched_dp"]) == (16, {"0": 12, "1": 16})
    assert "weighted_dp" not in plain["w"]
    assert weighed["w"]["weighted"] == 12 + 0.5 * 4  # more than any single rank has
    assert weighed["w"]["weighted_dp"] == {"0": 12.0, "1": 4 + 0.5 * 12}
    assert weighed["alike"]["weighted"] == 16.0
    assert not {"matched_dp", "weighted_dp"} & weighed["alike"].keys()  # omitted: they would repeat other fields


@pytest.mark.parametrize(
    ("weights", "expected"),
    [([1, 0.5, 0.25, 0.125], 4 + 2 + 1 + 0.5), ({"gpu": 1, "DISK": 0.5}, 4 + 2)],
    ids=["list", "by name"],
)
async def test_tier_weights_give_one_number(client: AsyncClient, fed: HandFed, weights: Any, expected: float) -> None:
    await fed.hold(Stream("1"), TOKENS, {tier: range(tier, tier + 1) for tier in range(4)})
    assert (await ask(client, **peer(tier_weights=weights)))["instances"]["1"]["weighted"] == expected
    assert (await ask(client, **rfc(tier_weights=weights)))["default"]["1"]["weighted"] == expected


async def test_adapters_and_salts_enter_the_hash(client: AsyncClient, fed: HandFed) -> None:
    held: dict[str, dict[str, Any]] = {
        "plain": {},
        "ad": {"lora_name": "ad"},
        "salted": {"cache_salt": "x"},
        "both": {"lora_name": "ad", "cache_salt": "x"},
        "seven": {"lora_name": "7"},
    }
    for worker, names in held.items():
        await fed.hold(Stream(worker), TOKENS, **names)
    for worker, names in held.items():
        assert (await ask(client, **peer(**names)))["scores"] == {worker: {"0": 16}}
        local = local_hashes(token_array(TOKENS), 4, namespace_seed(**names)).view(np.int64).tolist()
        assert (await ask(client, "/query_by_hash", **peer(block_hashes=local)))["scores"] == {worker: {"0": 16}}
    asked: list[tuple[dict[str, Any], str]] = [
        *(({salt: "x"}, "salted") for salt in ("cache_salt", "additionalsalt", "additional_salt")),
        *(({"lora_id": number}, "seven") for number in (7, "7")),  # an adapter that the engine names by its number
        *(({"lora_id": number, "lora_name": "ad"}, "ad") for number in (7, "7")),
        *(({"lora_id": none}, "plain") for none in (None, 0, "")),
    ]
    for names, worker in asked:
        assert [*(await ask(client, **rfc(**names)))["default"]] == [worker], names


async def test_hashes_and_packed_numbers_give_the_answer_of_the_tokens(client: AsyncClient, fed: HandFed) -> None:
    await fed.hold(Stream("1"), TOKENS)
    signed = LOCAL.view(np.int64).tolist()
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/query", {"token_ids": TOKENS}),
        ("/query_by_hash", {"seq_hashes": ROLLING.tolist()}),
        ("/query_by_hash", {"block_hashes": signed}),
        ("/query", {"token_ids": token_array(TOKENS).tobytes()}),
        ("/query_by_hash", {"seq_hashes": ROLLING.tobytes()}),
        ("/query_by_hash", {"block_hashes": LOCAL.tobytes()}),
    ]
    for path, fields in asked:
        if not isinstance(next(iter(fields.values())), bytes):
            assert (await ask(client, path, model_name="m", **fields))["scores"] == {"1": {"0": 16}}
            assert (await ask(client, path, model="m", block_size=4, **fields))["default"]["1"]["GPU"] == 16
        body = msgspec.msgpack.encode({"model_name": "m", **fields})
        for content_type in (MSGPACK, "application/x-msgpack"):
            response = await client.post(path, content=body, headers={"content-type": content_type})
            assert response.json()["scores"] == {"1": {"0": 16}}
    old_name = rfc(block_hash=ROLLING.tolist())
    assert (await ask(client, "/query_by_hash", **old_name))["default"]["1"]["GPU"] == 16
    bad = await client.post("/query_by_hash", json={**old_name, "block_hash": [1, -1]})
    check_problem(bad, 422, field="block_hash[1]")


async def test_an_adapters_name_beside_hashes_changes_nothing(client: AsyncClient, fed: HandFed) -> None:
    local = local_hashes(token_array(TOKENS), 4, namespace_seed("ad")).view(np.int64).tolist()
    rolled = await fed.hold(Stream("1"), TOKENS, lora_name="ad")
    prompts: list[dict[str, Any]] = [{"block_hashes": local}, {"seq_hashes": rolled}, {"block_hash": rolled}]
    names: list[dict[str, Any]] = [{}, {"lora_name": "ad"}, {"lora_name": "another"}, {"lora_id": 7}]
    for prompt in prompts:
        for name in names:
            assert (await ask(client, "/query_by_hash", **rfc(**prompt, **name)))["default"]["1"]["GPU"] == 16


async def test_a_batch_answers_each_query_in_its_place(client: AsyncClient, fed: HandFed) -> None:
    await fed.hold(Stream("1"), TOKENS)
    queries = [peer(), peer(model_name="nope"), rfc(), {"model_name": "m"}, 7, peer(seq_hashes=ROLLING[:2].tolist())]
    for encode, content_type in ((msgspec.json.encode, "application/json"), (msgspec.msgpack.encode, MSGPACK)):
        body, headers = encode({"queries": queries}), {"content-type": content_type}
        results = (await client.post("/query/batch", content=body, headers=headers)).json()["results"]
        assert results[0]["scores"] == {"1": {"0": 16}}
        assert results[2]["default"]["1"]["GPU"] == 16
        assert results[5]["scores"] == {"1": {"0": 8}}
        assert [results[i]["status"] for i in (1, 3, 4)] == [404, 422, 422]


def states(worker: str = "1", **more: Any) -> Stream:
    return Stream(worker, model="m#mamba", **more)


async def hold_with_a_state(fed: Any, state_page: int, **more: Any) -> None:
    """Store the whole prompt and a state at the end of one page."""
    hashes = await fed.hold(Stream("1", **more), TOKENS)
    await fed.feed(states(**more).batch(stored((0, [hashes[state_page]]))))


@pytest.mark.parametrize(("query", "path"), [(peer(), ("instances",)), (rfc(), ("default",))], ids=["peer", "rfc"])
async def test_every_figure_of_an_answer_is_what_can_be_reused(
    client: AsyncClient, fed: HandFed, query: dict[str, Any], path: tuple[str]
) -> None:
    await hold_with_a_state(fed, 1)
    await hold_with_a_state(fed, 2, dp_rank=1)
    await fed.hold(Stream("2"), TOKENS)
    answer = (await client.post("/query", json=query)).json()
    workers = answer[path[0]]
    tiers = ["gpu", "cpu", "disk", "external"]
    keys = tiers if path[0] == "instances" else [tier.upper() for tier in tiers]
    assert [workers["1"][key] for key in ["longest_matched", *keys]] == [12] * 5
    assert workers["1"]["dp" if path[0] == "instances" else "DP"] == {"0": 8, "1": 12}
    assert workers["2"]["longest_matched"] == 16
    if path[0] == "instances":
        assert answer["scores"] == {"1": {"0": 8, "1": 12}, "2": {"0": 16}}


async def test_hashes_and_batches_get_it_too(client: AsyncClient, fed: HandFed) -> None:
    await hold_with_a_state(fed, 1)
    hashes = await fed.hold(Stream("2"), TOKENS)
    by_hash = (await client.post("/query_by_hash", json={"model_name": "m", "seq_hashes": hashes})).json()
    batch = (await client.post("/query/batch", json={"queries": [peer(), rfc()]})).json()["results"]
    assert by_hash["instances"]["1"]["longest_matched"] == 8
    assert [batch[0]["instances"]["1"]["gpu"], batch[1]["default"]["1"]["GPU"]] == [8, 8]


@pytest.mark.parametrize("state_page", [3, None])
async def test_a_worker_from_which_nothing_can_be_reused_is_left_out(
    client: AsyncClient, fed: HandFed, state_page: int | None
) -> None:
    """The prompt ends with its fourth page, whose last token is computed in any case: the state there is no use."""
    hashes = await fed.hold(Stream("1"), TOKENS)
    await fed.feed(states().batch(*([] if state_page is None else [stored((0, [hashes[state_page]]))])))
    answer = (await client.post("/query", json=peer())).json()
    longer = (await client.post("/query", json={**peer(), "token_ids": [*TOKENS, 1]})).json()
    assert (answer["instances"], answer["scores"]) == ({}, {})
    assert [each["gpu"] for each in longer["instances"].values()] == ([16] if state_page else [])


async def test_workers_show_their_groups_and_models_do_not(client: AsyncClient, fed: HandFed) -> None:
    await hold_with_a_state(fed, 1)
    await fed.feed(Stream("1", model="m#swa:8", dp_rank=0).batch(stored((0, [1, 2])), digest=bytes(64)))
    (worker,) = (await client.get("/workers")).json()
    filtered = (await client.get("/workers", params={"model_name": "m#mamba"})).json()
    assert (worker["model_name"], worker["state"], filtered) == ("m", "live", [])
    assert {name: sorted(ranks) for name, ranks in worker["groups"].items()} == {"mamba": ["0"], "swa:8": ["0"]}
    listener = worker["groups"]["mamba"]["0"]
    assert (listener["endpoint"], listener["pages"]["GPU"]) == ("default/m%23mamba/1/0", 1)
    assert worker["groups"]["swa:8"]["0"]["state"] == "stale"


async def test_groups_of_a_model_that_no_worker_serves_are_listed_by_themselves(
    client: AsyncClient, fed: HandFed
) -> None:
    await fed.feed(states().batch())
    (worker,) = (await client.get("/workers")).json()
    assert worker["model_name"] == "m#mamba"


async def test_a_view_is_that_of_full_kv_unless_a_group_is_named_and_says_which_groups_hold_a_page(
    client: AsyncClient, fed: HandFed
) -> None:
    await hold_with_a_state(fed, 1)
    hashes = await fed.hold(Stream("2"), TOKENS)
    for params, num_pages in (({}, 4), ({"model": "m"}, 4), ({"model": "m#mamba"}, 1)):
        assert (await client.get("/workers/1/view", params=params)).json()["num_pages"] == num_pages
    pages = (await client.get("/workers/1/view")).json()["pages"]
    plain = (await client.get("/workers/2/view")).json()["pages"]
    assert {page["sequence_hash"]: page["groups"] for page in pages} == {
        name: {"mamba": ["GPU"] if number == 1 else []} for number, name in enumerate(hashes)
    }
    assert not any("groups" in page for page in plain)


@pytest.mark.parametrize("params", [{}, {"model": "m"}])
async def test_a_resync_is_one_of_the_groups_too(client: AsyncClient, fed: HandFed, params: dict[str, str]) -> None:
    await hold_with_a_state(fed, 1)
    answer = (await client.post("/workers/1/resync", params=params)).json()
    assert answer["streams"] == ["default/m/1/0", "default/m%23mamba/1/0"]


async def test_models_that_are_known_do_not_name_groups(client: AsyncClient, fed: HandFed) -> None:
    await hold_with_a_state(fed, 1)
    response = await client.post("/query", json={**peer(), "model_name": "x"})
    assert check_problem(response, 404)["detail"].endswith("known: m (routing_group=default)")
