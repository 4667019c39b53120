"""The contract of both clients, against the real API on loopback."""

import asyncio
import base64
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest

from kv_events.errors import InvalidValueError
from kv_events.hashing import local_hashes, namespace_seed, sequence_hashes, token_array
from kvsight import (
    AsyncClient,
    Client,
    ClientClosedError,
    KvsightConnectionError,
    KvsightHttpError,
    Prompt,
    RetryPolicy,
    best_worker,
)
from tests.rigs.api import served
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream, stored
from tests.support.servers.scripted_server import Reply, scripted
from tests.support.waiting import async_wait_until

TOKENS = list(range(1, 17))
KINDS = ("sync", "async")
Ask = Callable[..., Awaitable[Any]]


class Rig(NamedTuple):
    """A served API, and a client of it."""

    fed: HandFed
    ask: Ask
    """`await ask("query", ...)` calls the method of that name on either client."""


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
    async with (
        served(fed.consumer, api_token="secret") as http,
        asking(request.param, str(http.base_url), token="secret") as ask,
    ):
        yield Rig(fed, ask)


async def test_a_query_reports_what_every_worker_holds(rig: Rig) -> None:
    await rig.fed.hold(Stream("one"), TOKENS)
    await rig.fed.hold(Stream("two"), TOKENS, {0: range(1), 1: range(1, 3)})
    for tokens in (TOKENS, np.array(TOKENS), np.array(TOKENS, np.uint32), tuple(TOKENS)):
        answer = await rig.ask("query", "m", tokens)
        held = {name: (each.gpu, each.cpu, each.state) for name, each in answer.instances.items()}
        assert held == {"one": (16, 16, "live"), "two": (4, 12, "live")}
        assert answer.scores == {"one": {0: 16}, "two": {0: 4}}


async def test_a_prompt_may_be_given_in_every_form(rig: Rig) -> None:
    rolled = await rig.fed.hold(Stream("one"), TOKENS, lora_name="ad")
    local = local_hashes(token_array(TOKENS), 4, namespace_seed("ad"))
    assert max(rolled) >= 2**63  # local hashes of 2**63 and more, so that signs matter
    by_sequence = await rig.ask("query_by_hash", "m", seq_hashes=rolled)
    by_block = await rig.ask("query_by_hash", "m", block_hashes=local.view(np.int64))
    assert by_sequence.instances["one"].gpu == by_block.instances["one"].gpu == 16
    raw = await rig.ask("query_raw", {"model": "m", "block_size": 4, "block_hash": rolled})
    assert raw["default"]["one"]["GPU"] == 16
    prompts = [Prompt("m", TOKENS[:4], lora_name="ad"), Prompt("other", TOKENS), Prompt("m", seq_hashes=rolled)]
    first, refused, last = await rig.ask("query_batch", prompts)
    assert (first.instances["one"].gpu, last.instances["one"].gpu) == (4, 16)
    assert isinstance(refused, KvsightHttpError)
    assert (refused.status, refused.kind) == (404, "urn:kvsight:problem:unknown-model")

    names: dict[str, Any] = {"lora_name": "ad", "cache_salt": "x"}
    await rig.fed.hold(Stream("one", tenant="t"), TOKENS, **names)
    answer = await rig.ask("query", "m", TOKENS, **names, tenant="t", tier_weights=(0.5, 0, 0, 0))
    assert answer.instances["one"].weighted == 8.0
    assert (await rig.ask("query", "m", TOKENS, tenant="t")).instances == {}

    pairs = sequence_hashes(token_array(TOKENS), 4, is_bigram=True).tolist()
    await rig.fed.feed(Stream("one", model="pairs").batch(stored((0, pairs))))
    assert (await rig.ask("query", "pairs", TOKENS, is_eagle=True)).instances["one"].gpu == 12  # 15 pairs
    assert (await rig.ask("query", "pairs", TOKENS)).instances == {}


async def test_a_refusal_reports_what_was_wrong(rig: Rig) -> None:
    with pytest.raises(KvsightHttpError, match=r"/query: no indexer for model=other .*\(status 404\)") as caught:
        await rig.ask("query", "other", TOKENS)
    assert (caught.value.status, caught.value.title) == (404, "No worker serves this model")
    assert "known: none" in caught.value.detail
    with pytest.raises(KvsightHttpError) as caught:
        await rig.ask("query", "m", TOKENS, tier_weights=(1, 2, 3, -4))
    assert (caught.value.status, caught.value.field) == (422, "tier_weights.external")
    for name, arguments, field in (
        ("query", {"token_ids": [1, -1]}, r"token_ids\[1\]"),
        ("query_by_hash", {"seq_hashes": [-1]}, "seq_hashes"),
        ("query_by_hash", {"block_hashes": [2**63]}, "block_hashes"),
        ("query_by_hash", {}, "prompt"),
        ("query_by_hash", {"seq_hashes": [1], "block_hashes": [1]}, "prompt"),
    ):
        with pytest.raises(InvalidValueError, match=field):  # before it is sent
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

    await rig.fed.hold(Stream("w", model="ranks"), TOKENS, {1: range(2)})
    await rig.fed.hold(Stream("w", model="ranks", dp_rank=1), TOKENS, {1: range(4)})
    assert (await rig.ask("best_worker", "ranks", TOKENS))[:4] == ("w", 1, 16, 12.0)
    await rig.fed.hold(Stream("w", model="ranks", dp_rank=2), TOKENS, {0: range(3)})
    assert (await rig.ask("best_worker", "ranks", TOKENS, tier_weights=(1, 0.5, 0, 0)))[:4] == ("w", 2, 12, 12.0)
    assert best_worker(await rig.ask("query", "ranks", TOKENS)) == ("w", 1, 16, 16.0)

    assert await rig.ask("best_worker", "new", TOKENS) is None
    assert (await rig.ask("best_worker", "new", TOKENS, load={"a": 2, "b": 1})).worker == "b"
    with pytest.raises(KvsightHttpError, match="tier_weights"):
        await rig.ask("best_worker", "new", TOKENS, tier_weights=(-1, 0, 0, 0))


async def test_workers_show_their_ranks_endpoints_groups_and_failures(rig: Rig) -> None:
    hashes = await rig.fed.hold(Stream("one"), TOKENS)
    await rig.fed.hold(Stream("one", dp_rank=1), TOKENS[:4])
    await rig.fed.hold(Stream("else", model="n"), TOKENS)
    await rig.fed.feed(Stream("one", model="m#mamba").batch(stored((0, hashes))))
    (worker,) = await rig.ask("workers", model="m")
    assert (worker.instance_id, worker.block_size, worker.state) == ("one", 4, "live")
    assert {rank: listener.pages["GPU"] for rank, listener in worker.listeners.items()} == {0: 4, 1: 1}
    assert worker.endpoints == {0: "default/m/one/0", 1: "default/m/one/1"}
    assert worker.groups["mamba"][0].endpoint == "default/m%23mamba/one/0"
    assert (worker.listeners[0].failure, worker.listeners[0].counters["pages_stored"]) == (None, 4)
    assert len(await rig.ask("workers")) == 2
    assert len((await rig.ask("dump"))["n:default"]["events"]) == 4


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
    await rig.fed.hold(Stream("one"), TOKENS)
    await rig.fed.hold(Stream("one", dp_rank=1), TOKENS)
    assert await rig.ask("resync", "one", dp_rank=1) == ["default/m/one/1"]


async def test_probes_answer_yes_or_no(rig: Rig) -> None:
    assert await rig.ask("health") is True
    await async_wait_until(lambda: rig.ask("ready"), what="the empty log to be read")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_without_the_token_gets_an_error(kind: str) -> None:
    async with served(HandFed().consumer, api_token="secret") as http, asking(kind, str(http.base_url)) as ask:
        with pytest.raises(KvsightHttpError) as caught:
            await ask("workers")
    assert caught.value.status == 401
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_address_without_a_server_is_an_error_that_may_pass(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://user:pass@127.0.0.1:{free.getsockname()[1]}"
    async with asking(kind, url, retry=RetryPolicy(attempts=2, first_pause_s=0)) as ask:
        with pytest.raises(KvsightConnectionError, match=r"127\.0\.0\.1") as caught:
            await ask("query", "m", TOKENS)
    assert caught.value.retriable
    assert "pass" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://host", "http://", "http://host:x", "", "user:pass@host:1", "http://\udcff"]
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(InvalidValueError, match="url") as caught:
            kind(url)
        assert "pass" not in str(caught.value)


@pytest.mark.parametrize("token", ["s3cret\n", " s3cret", "s3cr et", "s3cr\r\nX: y", "s3cr\xe9t"])
def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(token: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(InvalidValueError, match=r"token: .*, expected printable ASCII") as caught:
            kind("http://host", token=token)
        assert "s3cr" not in f"{caught.value} {caught.value.value}"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_user_in_the_address_is_sent_and_never_shown(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with scripted(Reply(body=b"[]"), Reply(404)) as server:
        url = server.url.replace("//", "//us%40er:p%3Ass@")
        async with asking(kind, url) as ask:
            await ask("workers")
            with pytest.raises(KvsightHttpError, match="127") as caught:
                await ask("workers")
    assert server.requests[0].headers["authorization"] == "Basic " + base64.b64encode(b"us@er:p:ss").decode()
    for secret in ("us%40er", "us@er", "p%3Ass", "p:ss"):
        assert secret not in caplog.text + str(caught.value)


def test_a_user_in_the_address_beside_a_token_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="token") as caught:
        Client("http://user:pass@host", token="t")
    assert "pass@" not in str(caught.value)


async def test_a_mistyped_candidate_is_warned_of_once(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    await rig.fed.hold(Stream("vllm-0"), TOKENS)
    for _ in range(3):
        chosen = await rig.ask("best_worker", "m", TOKENS, load={"vllmm-0": 0, "vllm-0": 99})
        assert chosen.worker == "vllmm-0"  # it may be new
    assert [line.message for line in caplog.records if line.name == "kvsight.client"] == [
        "load: the service knows no worker 'vllmm-0'; the nearest name is vllm-0"
    ]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_list_of_workers_that_does_not_come_delays_the_choice_no_longer_than_half_a_second(kind: str) -> None:
    reply, unfinished = Reply(body=b'{"scores": {}, "instances": {}}'), Reply(100, b"")
    async with scripted(reply, unfinished, reply) as server, asking(kind, server.url, timeout_s=60.0) as ask:
        for _ in range(2):
            assert (await asyncio.wait_for(ask("best_worker", "m", TOKENS, load={"new": 0}), 30)).worker == "new"
    assert [request.line.split()[1] for request in server.requests] == ["/query", "/workers", "/query"]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_closed_client_says_so(kind: str) -> None:
    async with asking(kind, "http://127.0.0.1:1") as ask:
        pass
    with pytest.raises(ClientClosedError, match="this client is closed"):
        await ask("health")


async def test_an_answer_shows_only_what_it_has(rig: Rig) -> None:
    await rig.fed.hold(Stream("w"), TOKENS)
    assert "UNSET" not in repr(await rig.ask("query", "m", TOKENS))
