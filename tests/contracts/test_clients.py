"""What both clients promise, against the real API on loopback."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
from hand_fed import HandFed
from waiting import async_wait_until
from wire import Stream, stored

from api.app import create_app
from api.server import running_server
from api.settings import ApiSettings
from kv_events.errors import InvalidValueError
from kv_events.hashing import local_hashes, namespace_seed, sequence_hashes, token_array
from kv_events.schema import ResyncRequest
from kvsight import AsyncClient, Client, KvsightConnectionError, KvsightHttpError, Prompt, RetryPolicy, best_worker

TOKENS = list(range(1, 17))
KINDS = ("sync", "async")
Ask = Callable[..., Awaitable[Any]]


class Rig(NamedTuple):
    """A served API, and a client of it."""

    fed: HandFed
    ask: Ask
    """`await ask("query", ...)`: the method of that name, of whichever client."""


@asynccontextmanager
async def asking(kind: str, url: str, **options: Any) -> AsyncIterator[Ask]:
    if kind == "async":
        async with AsyncClient(url, **options) as client:
            yield lambda name, *args, **kwargs: getattr(client, name)(*args, **kwargs)
    else:
        with Client(url, **options) as blocking:
            yield lambda name, *args, **kwargs: asyncio.to_thread(getattr(blocking, name), *args, **kwargs)


@pytest.fixture(params=KINDS)
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    fed = HandFed()
    settings = ApiSettings(port=0, api_token="secret")
    async with (
        running_server(create_app(fed.consumer, settings), settings) as url,
        asking(request.param, url, token="secret") as ask,
    ):
        yield Rig(fed, ask)


async def test_a_query_tells_what_every_worker_holds(rig: Rig) -> None:
    await rig.fed.hold(Stream("one"), TOKENS)
    await rig.fed.hold(Stream("two"), TOKENS, {0: range(1), 1: range(1, 3)})
    answer = await rig.ask("query", "m", TOKENS)
    held = {name: (each.gpu, each.cpu, each.state) for name, each in answer.instances.items()}
    assert held == {"one": (16, 16, "live"), "two": (4, 12, "live")}
    assert answer.scores == {"one": {0: 16}, "two": {0: 4}}


@pytest.mark.parametrize("tokens", [np.array(TOKENS), np.array(TOKENS, np.uint32), tuple(TOKENS)])
async def test_tokens_may_come_in_arrays(rig: Rig, tokens: Any) -> None:
    await rig.fed.hold(Stream("one"), TOKENS)
    assert (await rig.ask("query", "m", tokens)).instances["one"].gpu == 16


async def test_a_namespace_is_asked_for_by_its_names(rig: Rig) -> None:
    await rig.fed.hold(Stream("one", tenant="t"), TOKENS, lora_name="ad", cache_salt="x")
    answer = await rig.ask(
        "query", "m", TOKENS, lora_name="ad", cache_salt="x", tenant="t", tier_weights=(0.5, 0, 0, 0)
    )
    assert answer.instances["one"].weighted == 8.0
    assert (await rig.ask("query", "m", TOKENS, tenant="t")).instances == {}


async def test_a_prompt_may_be_given_by_either_kind_of_hash(rig: Rig) -> None:
    rolled = await rig.fed.hold(Stream("one"), TOKENS, lora_name="ad")
    local = local_hashes(token_array(TOKENS), 4, namespace_seed("ad"))
    assert max(rolled) >= 2**63  # so that signs matter
    by_sequence = await rig.ask("query_by_hash", "m", seq_hashes=rolled)
    by_block = await rig.ask("query_by_hash", "m", block_hashes=local.view(np.int64), lora_name="ad")
    assert by_sequence.instances["one"].gpu == by_block.instances["one"].gpu == 16


async def test_pages_of_token_pairs_are_asked_for_by_tokens_too(rig: Rig) -> None:
    names = sequence_hashes(token_array(TOKENS), 4, is_bigram=True).tolist()
    await rig.fed.feed(Stream("one").batch(stored((0, names))))
    assert (await rig.ask("query", "m", TOKENS, is_eagle=True)).instances["one"].gpu == 12  # 15 pairs
    assert (await rig.ask("query", "m", TOKENS)).instances == {}


async def test_a_batch_answers_each_prompt_and_keeps_refusals_in_their_places(rig: Rig) -> None:
    hashes = await rig.fed.hold(Stream("one"), TOKENS)
    prompts = [Prompt("m", TOKENS[:4]), Prompt("other", TOKENS), Prompt("m", seq_hashes=hashes)]
    first, refused, last = await rig.ask("query_batch", prompts)
    assert (first.instances["one"].gpu, last.instances["one"].gpu) == (4, 16)
    assert isinstance(refused, KvsightHttpError)
    assert (refused.status, refused.kind) == (404, "urn:kvsight:problem:unknown-model")


async def test_a_question_may_be_asked_in_the_other_dialect(rig: Rig) -> None:
    hashes = await rig.fed.hold(Stream("one"), TOKENS)
    answer = await rig.ask("query_raw", {"model": "m", "block_size": 4, "block_hash": hashes})
    assert answer["default"]["one"]["GPU"] == 16


async def test_a_refusal_says_what_was_wrong(rig: Rig) -> None:
    with pytest.raises(KvsightHttpError, match=r"/query: no indexer for model=other .*\(status 404\)") as caught:
        await rig.ask("query", "other", TOKENS)
    assert (caught.value.status, caught.value.title) == (404, "Nobody serves this model")
    assert "known: none" in caught.value.detail
    with pytest.raises(KvsightHttpError) as caught:
        await rig.ask("query", "m", TOKENS, tier_weights=(1, 2, 3, -4))
    assert (caught.value.status, caught.value.field) == (422, "tier_weights.external")


async def test_a_bad_argument_is_refused_before_it_is_sent(rig: Rig) -> None:
    for name, arguments, field in (
        ("query", {"token_ids": [1, -1]}, r"token_ids\[1\]"),
        ("query_by_hash", {"seq_hashes": [-1]}, "seq_hashes"),
        ("query_by_hash", {"block_hashes": [2**63]}, "block_hashes"),
        ("query_by_hash", {}, "prompt"),
        ("query_by_hash", {"seq_hashes": [1], "block_hashes": [1]}, "prompt"),
    ):
        with pytest.raises(InvalidValueError, match=field):
            await rig.ask(name, "m", **arguments)


async def test_the_best_worker_is_chosen_from_the_answer(rig: Rig) -> None:
    await rig.fed.hold(Stream("deep"), TOKENS, {0: range(1), 1: range(1, 4)})
    await rig.fed.hold(Stream("fast", dp_rank=1), TOKENS, {0: range(3)})
    chosen = await rig.ask("best_worker", "m", TOKENS)  # 4 + 12 x 0.75 against 12
    assert (chosen.worker, chosen.dp_rank, chosen.tokens, chosen.score) == ("deep", 0, 16, 13.0)
    chosen = await rig.ask("best_worker", "m", TOKENS, tier_weights=(1, 0.5, 0, 0))
    assert (chosen.worker, chosen.dp_rank) == ("fast", 1)
    chosen = await rig.ask("best_worker", "m", TOKENS, load={"deep": 20, "fast": 20, "idle": 0})
    assert (chosen.worker, chosen.dp_rank) == ("idle", None)


async def test_a_model_that_nobody_was_seen_with_is_held_by_nobody(rig: Rig) -> None:
    assert await rig.ask("best_worker", "new", TOKENS) is None
    assert (await rig.ask("best_worker", "new", TOKENS, load={"a": 2, "b": 1})).worker == "b"
    with pytest.raises(KvsightHttpError, match="tier_weights"):
        await rig.ask("best_worker", "new", TOKENS, tier_weights=(-1, 0, 0, 0))


async def test_workers_show_their_views(rig: Rig) -> None:
    await rig.fed.hold(Stream("one"), TOKENS)
    await rig.fed.hold(Stream("one", dp_rank=1), TOKENS[:4])
    await rig.fed.hold(Stream("else", model="n"), TOKENS)
    (worker,) = await rig.ask("workers", model="m")
    assert (worker.instance_id, worker.block_size, worker.state) == ("one", 4, "live")
    assert {rank: listener.pages["GPU"] for rank, listener in worker.listeners.items()} == {0: 4, 1: 1}
    assert len(await rig.ask("workers")) == 2


async def test_a_view_is_read_part_by_part_whatever_the_workers_name(rig: Rig) -> None:
    worker = "a/b c?d=%41#e"
    hashes = await rig.fed.hold(Stream(worker), TOKENS)
    await rig.fed.hold(Stream(worker, dp_rank=1), [9] * 4)
    first = await rig.ask("view", worker, dp_rank=0, limit=3)
    rest = await rig.ask("view", worker, dp_rank=0, limit=3, cursor=first.next_cursor)
    assert rest.next_cursor is None
    assert sorted(page.sequence_hash for page in first.pages + rest.pages) == sorted(hashes)
    assert {medium for page in first.pages for medium in page.media} == {"GPU"}


async def test_a_resync_names_the_streams_that_are_asked(rig: Rig) -> None:
    requests: list[ResyncRequest] = []
    rig.fed.log.listen(requests.append)
    await rig.fed.hold(Stream("one"), TOKENS)
    await rig.fed.hold(Stream("one", dp_rank=1), TOKENS)
    assert await rig.ask("resync", "one", dp_rank=1) == ["default/m/one/1"]
    await async_wait_until(lambda: requests, what="a resync request")
    assert requests[0].stream == "default/m/one/1"


async def test_a_dump_has_every_page(rig: Rig) -> None:
    await rig.fed.hold(Stream("one"), TOKENS)
    assert len((await rig.ask("dump"))["m:default"]["events"]) == 4


async def test_probes_answer_yes_or_no(rig: Rig) -> None:
    assert await rig.ask("health") is True
    await async_wait_until(lambda: rig.ask("ready"), what="the empty log to be read")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_without_the_token_is_told_so(kind: str) -> None:
    settings = ApiSettings(port=0, api_token="secret")
    async with (
        running_server(create_app(HandFed().consumer, settings), settings) as url,
        asking(kind, url) as ask,
    ):
        with pytest.raises(KvsightHttpError) as caught:
            await ask("workers")
    assert caught.value.status == 401
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
async def test_nobody_at_the_address_is_an_error_that_may_pass(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://user:pass@127.0.0.1:{free.getsockname()[1]}"
    async with asking(kind, url, retry=RetryPolicy(attempts=2, first_pause_s=0)) as ask:
        with pytest.raises(KvsightConnectionError, match=r"127\.0\.0\.1") as caught:
            await ask("query", "m", TOKENS)
    assert caught.value.retriable
    assert "pass" not in str(caught.value)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "http://host:x", ""])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(InvalidValueError, match="url"):
            kind(url)


def test_both_clients_have_the_same_methods() -> None:
    def methods(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")} - {"close", "aclose"}

    assert methods(Client) == methods(AsyncClient)
    assert Client.query.__name__ == "query"
    assert Client.best_worker.__doc__ == AsyncClient.best_worker.__doc__
    assert best_worker.__doc__ is not None
