"""Group streams over HTTP: `reusable` in answers, groups listed under their worker, and answers without groups."""

from typing import Any

import pytest
from httpx import AsyncClient

from tests.support.http_checks import check_problem
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream, stored

TOKENS = list(range(1, 17))
PEER = {"model_name": "m", "token_ids": TOKENS}
RFC = {"model": "m", "block_size": 4, "token_ids": TOKENS}


def states(worker: str = "1", **more: Any) -> Stream:
    return Stream(worker, model="m#mamba", **more)


async def hold_with_a_state(fed: Any, state_page: int, worker: str = "1", **more: Any) -> None:
    """Store the whole prompt and a state at the end of one page."""
    hashes = await fed.hold(Stream(worker, **more), TOKENS)
    await fed.feed(states(worker, **more).batch(stored((0, [hashes[state_page]]))))


@pytest.mark.parametrize(("query", "path"), [(PEER, ("instances",)), (RFC, ("default",))], ids=["peer", "rfc"])
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
    batch = (await client.post("/query/batch", json={"queries": [PEER, RFC]})).json()["results"]
    assert by_hash["instances"]["1"]["longest_matched"] == 8
    assert [batch[0]["instances"]["1"]["gpu"], batch[1]["default"]["1"]["GPU"]] == [8, 8]


@pytest.mark.parametrize("state_page", [3, None])
async def test_a_worker_from_which_nothing_can_be_reused_is_left_out(
    client: AsyncClient, fed: HandFed, state_page: int | None
) -> None:
    """The prompt ends with its fourth page, whose last token is computed in any case: the state there is no use."""
    hashes = await fed.hold(Stream("1"), TOKENS)
    await fed.feed(states().batch(*([] if state_page is None else [stored((0, [hashes[state_page]]))])))
    answer = (await client.post("/query", json=PEER)).json()
    longer = (await client.post("/query", json={**PEER, "token_ids": [*TOKENS, 1]})).json()
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


async def test_a_view_is_that_of_full_kv_unless_a_group_is_named(client: AsyncClient, fed: HandFed) -> None:
    await hold_with_a_state(fed, 1)
    pages = {}
    for model in (None, "m", "m#mamba"):
        params = {} if model is None else {"model": model}
        pages[model] = (await client.get("/workers/1/view", params=params)).json()["num_pages"]
    assert pages == {None: 4, "m": 4, "m#mamba": 1}


async def test_a_view_says_which_groups_hold_a_page(client: AsyncClient, fed: HandFed) -> None:
    await hold_with_a_state(fed, 1)
    hashes = await fed.hold(Stream("2"), TOKENS)
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
    response = await client.post("/query", json={**PEER, "model_name": "x"})
    assert check_problem(response, 404)["detail"].endswith("known: m (routing_group=default)")
