"""Kernels answer selections over direct connections as the routes do, and see every change at once."""

from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given, settings
from hypothesis import strategies as st

from api.fast.heads import Head
from kv_events.schema import CLOSED
from selection.candidates import Asked, Candidates, Choice
from selection.policies import OverlapLoadPolicy
from selection.settings import SelectionSettings
from tests.api.workers.test_reports import VLLM
from tests.rigs.direct_selections import BLOCK, CREATED, OK, PROMPT, a_fleet, asked, lengths, ranks
from tests.rigs.raw_http import body_of, heads_taken, request, run
from tests.support.effort import num_examples
from tests.support.log.records import Stream
from tests.support.waiting import async_wait_until


@given(
    ranks,
    st.sets(st.sampled_from(["mamba", "swa:20", "eagle"]), max_size=2),
    st.lists(asked, min_size=1, max_size=4),
    st.lists(lengths, max_size=4),
)
@settings(max_examples=num_examples(25))
def test_kernels_answer_as_the_routes_do(
    held: dict[tuple[str, int], dict[int, range]], groups: set[str], asked: list[dict[str, Any]], booked: list[int]
) -> None:
    async def ask() -> None:
        async with a_fleet(held, groups=groups) as fleet:
            for length in booked:
                assert await fleet.post("/select_and_reserve", token_ids=PROMPT[:length]) == OK
            for fields in asked:
                with heads_taken() as taken:
                    await fleet.agree(**fields)
                assert len(taken) <= 1  # Python answers the first request with a template, a kernel the next one

    run(ask())


@given(ranks, st.data(), st.lists(lengths, min_size=1, max_size=4))
@settings(max_examples=num_examples(25))
def test_kernels_choose_among_the_allowed_workers_as_the_routes_do(
    held: dict[tuple[str, int], dict[int, range]], data: st.DataObject, asked: list[int]
) -> None:
    async def ask() -> None:
        async with a_fleet(held) as fleet:
            workers = st.sampled_from([int(name) if name.isdigit() else name for name, _ in held])
            for length in asked:
                assert await fleet.post("/select_and_reserve", token_ids=PROMPT[:length]) == OK
                allowed = [*data.draw(st.sets(workers, min_size=1)), "unknown"]
                with heads_taken() as taken:
                    answer = await fleet.agree(token_ids=PROMPT[:length], allowed_worker_ids=allowed)
                assert answer["worker_id"] in allowed
                assert len(taken) <= 1
                await fleet.agree(token_ids=PROMPT[:length])  # any worker again
            nobody = request(body_of(token_ids=PROMPT, allowed_worker_ids=["unknown"]), "/select")
            answers = [(await fleet.direct.ask(nobody))[0] for _ in range(3)]
            assert answers == [b"HTTP/1.1 503 Service Unavailable"] * 3

    run(ask())


async def test_a_policy_that_derives_from_the_one_of_the_kernel_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Last(OverlapLoadPolicy):
        def choose(self, asked: Asked, candidates: Candidates) -> Choice:
            return super().choose(asked, candidates)._replace(row=len(candidates.workers) - 1)

    monkeypatch.setattr("selection.selector.create_policy", lambda _name: Last())
    async with a_fleet({("1", 0): {0: range(4)}, ("2", 0): {}}) as fleet:
        assert [await fleet.chosen() for _ in range(5)] == [2] * 5


async def test_a_kernel_sees_each_change_at_once(taken: list[Head]) -> None:
    async with a_fleet({("1", 0): {0: range(4)}, ("2", 0): {}}) as fleet:
        del taken[:]
        assert (await fleet.agree(token_ids=PROMPT))["worker_id"] == 1
        for number in range(9):  # their pages are predicted, so that only the load counts
            assert await fleet.post("/select_and_reserve", token_ids=PROMPT, selection_id=f"r{number}") == OK
            await fleet.agree(token_ids=PROMPT)
        await fleet.fed.hold(third := Stream("3", block_size=BLOCK), PROMPT)
        assert (await fleet.agree(token_ids=PROMPT))["worker_id"] == 3
        await fleet.fed.feed(third.batch(degraded_reason=CLOSED))
        assert (await fleet.agree(token_ids=PROMPT))["worker_id"] != 3
        assert not [head for head in taken if head.path == "/select"]


async def test_a_kernel_sees_workers_that_drain_and_leave(taken: list[Head]) -> None:
    async with a_fleet({("1", 0): {0: range(4)}, ("2", 0): {0: range(2)}, ("3", 0): {}}) as fleet:
        assert (await fleet.agree(token_ids=PROMPT))["worker_id"] == 1
        assert await fleet.post("/workers", worker_id=1, block_size=BLOCK, endpoint="http://127.0.0.1:9") == CREATED
        assert (await fleet.agree(token_ids=PROMPT))["endpoint"] == "http://127.0.0.1:9"
        assert (await fleet.reserved())["worker_id"] == 1
        assert await fleet.send(b"PATCH", "/workers/1", '{"lifecycle": "draining"}') == OK
        assert await fleet.num_booked() == 1
        assert (await fleet.agree(token_ids=PROMPT))["worker_id"] == 2
        assert await fleet.send(b"DELETE", "/workers/1") == OK
        assert (await fleet.agree(token_ids=PROMPT))["worker_id"] == 1  # which the log still names
        del taken[:]
        await fleet.agree(token_ids=PROMPT)
        assert not [head for head in taken if head.path == "/select"]


async def test_a_kernel_sees_reservations_that_end_and_expire() -> None:
    settings = SelectionSettings(reservation_ttl_s=2.0, predict_s=0.0)
    async with a_fleet({("1", 0): {0: range(4)}, ("2", 0): {0: range(3)}}, settings) as fleet:

        async def book(name: str) -> None:
            pinned = {"worker_id": 1, "dp_rank": 0}
            assert (
                await fleet.post("/select_and_reserve", token_ids=PROMPT, selection_id=name, pinned_worker=pinned) == OK
            )

        assert await fleet.chosen() == 1
        await book("a")
        assert await fleet.chosen() == 2
        assert await fleet.send(b"DELETE", "/reservations/a") == OK
        assert await fleet.chosen() == 1
        await book("b")
        assert await fleet.chosen() == 2

        async def is_over() -> bool:
            return await fleet.chosen() == 1

        await async_wait_until(is_over, 20, "the reservation to expire")


async def test_a_kernel_sees_what_engines_report() -> None:
    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=VLLM)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    async with TestServer(app) as engine, a_fleet({("1", 0): {0: range(4)}, ("2", 0): {0: range(3)}}) as fleet:
        assert (await fleet.agree(token_ids=PROMPT))["worker_id"] == 1
        at = str(engine.make_url("/")).rstrip("/")
        assert await fleet.post("/workers", worker_id=1, block_size=BLOCK, endpoint=at) == CREATED

        async def is_busy() -> bool:
            return await fleet.chosen() == 2

        await async_wait_until(is_busy, 20, "the report to count")


@pytest.mark.parametrize(
    "fields",
    [
        {"selection_id": "a"},
        {"sources": True},
        {"isl_tokens": 0},
        {"allowed_worker_ids": [1]},
        {"pinned_worker": {"worker_id": 1, "dp_rank": 0}},
        {"affinity_target": {"worker_id": 1}},
        {"allowed_worker_ids": []},
        {"model_name": "unknown"},
        {"token_ids": [1.5]},
    ],
)
async def test_other_selections_are_answered_by_python(fields: dict[str, Any]) -> None:
    async with a_fleet({("1", 0): {0: range(4)}, ("2", 0): {}}) as fleet:
        for _ in range(3):
            await fleet.agree(**{"token_ids": PROMPT, **fields})
            await fleet.agree(token_ids=PROMPT)


@pytest.mark.parametrize("policy", ["lmetric", "session,overlap-load"])
async def test_other_policies_are_asked(policy: str, taken: list[Head]) -> None:
    async with a_fleet({("1", 0): {0: range(4)}, ("2", 0): {}}, SelectionSettings(policy=policy)) as fleet:
        del taken[:]
        await fleet.agree(token_ids=PROMPT)
        assert len(taken) == 2
