"""Kernels book selections over direct connections as the routes do, also under the names of callers."""

import base64
import json
import time
from itertools import chain
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.fast.heads import Head
from api.fast.kernels.text import MARGIN
from api.selection.direct import MOST_CHOICES
from api.selection.kernels.record import BookedChoices, make_choices
from api.selection.kernels.select import MOST_HASHES
from kv_events.reservations import (
    OUTPUT_BLOCK,
    PREFILL_COMPLETE,
    RELEASED,
)
from kv_events.schema import CLOSED
from kvsight.routers.placement import Placement
from tests.rigs.direct_selections import (
    BLOCK,
    OK,
    PAGES,
    PROMPT,
    RESERVE,
    TAKEN,
    a_fleet,
    asked,
    ranks,
    step_of,
    steps,
)
from tests.rigs.raw_http import body_of, heads_taken, request, run
from tests.support.effort import num_examples
from tests.support.log.records import Stream
from tests.support.replica_process import reserved
from tests.support.waiting import async_wait_until

going_on = st.lists(asked | st.tuples(steps, st.integers(0, 5)), max_size=12)
names = st.sampled_from([TAKEN, "n", "r/s:t ~", "x" * 126, "x" * 128, "ü", 'quo"te'])
named = st.builds(
    lambda name, fields, is_first: {"selection_id": name, **fields} if is_first else {**fields, "selection_id": name},
    *(names, asked, st.booleans()),
)


@given(ranks, going_on)
@settings(max_examples=num_examples(25))
def test_kernels_book_as_the_routes_do(held: dict[tuple[str, int], dict[int, range]], life: list[Any]) -> None:
    """Every other reservation with the same fields is answered by a kernel."""

    async def follow(*, is_direct: bool) -> tuple[Any, ...]:
        async with a_fleet(held) as fleet:
            reservations_twice = [[each] * (1 + isinstance(each, dict)) for each in life]
            return await fleet.follow([*chain(*reservations_twice)], is_direct=is_direct)

    async def compare() -> None:
        with heads_taken() as taken:
            directly = await follow(is_direct=True)
        assert directly == await follow(is_direct=False)
        assert len([head for head in taken if head.path == "/select_and_reserve"]) <= len(life)

    run(compare())


@given(
    ranks, st.lists(named | asked, min_size=1, max_size=6), st.lists(st.tuples(steps, st.integers(0, 5)), max_size=3)
)
@settings(max_examples=num_examples(25))
def test_kernels_book_under_the_names_of_callers_as_the_routes_do(
    held: dict[tuple[str, int], dict[int, range]], booked: list[dict[str, Any]], ended: list[tuple[str, int]]
) -> None:
    async def follow(*, is_direct: bool) -> tuple[Any, ...]:
        async with a_fleet(held) as fleet:
            return await fleet.follow([*booked * 3, *ended, *booked], is_direct=is_direct)

    async def compare() -> None:
        assert await follow(is_direct=True) == await follow(is_direct=False)

    run(compare())


@pytest.mark.parametrize(
    "body",
    [
        '{{"selection_id":"{name}","model_name":"m","token_ids":[{tokens}]}}',
        '{{"model_name":"m", "token_ids" : [{tokens}], "selection_id" : "{name}", "allowed_worker_ids": ["1", 2]}}',
    ],
)
async def test_a_kernel_books_under_the_names_of_callers(body: str, taken: list[Head]) -> None:
    async with a_fleet({("1", 0): {0: range(4)}, ("2", 0): {}}) as fleet:
        lines = [fleet.direct, *await fleet.lines(7)]
        del taken[:]
        for number in range(20):
            text = body.format(name=f"n{number}", tokens=",".join(map(str, PROMPT)))
            answer = await fleet.direct.ask(request(text.encode(), "/select_and_reserve"))
            assert json.loads(answer[2])["selection_id"] == f"n{number}"
        assert len(taken) <= 1
        for turn in range(8):
            for number, line in enumerate(lines):
                tokens = ",".join(map(str, PROMPT[: BLOCK * (1 + number)]))
                text = body.format(name=f"r-{turn}-{number // 2}", tokens=tokens)
                line.writer.write(request(text.encode(), "/select_and_reserve"))
            answers = [await line.answer() for line in lines]
            assert sorted(status for status, *_ in answers) == 4 * [OK] + 4 * [b"HTTP/1.1 409 Conflict"]
            booked = sorted(json.loads(body)["selection_id"] for status, _, body in answers if status == OK)
            assert booked == [f"r-{turn}-{each}" for each in range(4)]
            assert all(name in fleet.exchange.book for name in booked)
            for name in booked:
                assert (await fleet.direct.ask(step_of(name, RELEASED)))[0] == OK


async def test_a_kernel_books_what_adapters_in_python_ask(taken: list[Head]) -> None:
    async with a_fleet({("1", 0): {0: range(4)}, ("2", 0): {}, ("3", 0): {0: range(8)}}) as fleet:
        placement = Placement(fleet.url)
        for workers in [["1", "2"]] * 8:
            placed = await placement.place({"model": "m", "prompt": PROMPT}, workers)
            assert placed is not None
            assert sorted(placed.workers) == workers
        await placement.aclose()
        assert len([head for head in taken if head.path == "/select_and_reserve"]) < 6


@pytest.mark.parametrize(
    "fields",
    [
        '"nested":{{"selection_id":"{name}"}},"selection_id":"other-{name}"',
        '"selection_id":"{name}","selection_id":"other-{name}"',
        '"session_id":"\\"selection_id\\":\\"a","selection_id":"other-{name}"',
        '"selection_id":null,"session_id":"{name}"',
    ],
)
async def test_a_name_is_never_taken_from_elsewhere(fields: str) -> None:
    async with a_fleet({("1", 0): {0: range(4)}}) as fleet:
        for name in "abcde":
            text = f'{{"model_name":"m","token_ids":{PROMPT},{fields.format(name=name)}}}'
            status, _, answer = await fleet.direct.ask(request(text.encode(), "/select_and_reserve"))
            given = json.loads(answer)["selection_id"]
            assert status == OK
            assert given == f"other-{name}" or ("null" in fields and given.startswith(fleet.exchange.replica))


@pytest.mark.parametrize("name", ["a\nb", ".", "..", "x/prefill"])
async def test_a_name_that_no_path_has_or_that_is_another_ones_is_refused(name: str) -> None:
    async with a_fleet({("1", 0): {0: range(4)}}) as fleet:
        for path in ("/select", "/select_and_reserve"):
            for _ in range(6):
                status, _, answer = await fleet.direct.ask(request(body_of(token_ids=PROMPT, selection_id=name), path))
                assert (status, json.loads(answer)["field"]) == (b"HTTP/1.1 422 Unprocessable Entity", "selection_id")
        assert await fleet.num_booked() == 0


@pytest.mark.parametrize(
    "member",
    [
        '"selection_id":"caf\\u00e9"',
        '"selection_id":"café"',
        '"selection_id":"a\\/b"',
        '"selection_id":"q\\"q"',
        '"selection_id":"\x7f"',
        f'"selection_id":"{"x" * 128}"',
        f'"selection_id":"{"x" * 129}"',
        '"selection_id":\n"b"',
        '"selection\\u005fid":"c"',
    ],
)
async def test_a_name_is_given_once_however_it_is_written(member: str) -> None:
    asked = request(f'{{"model_name":"m","token_ids":{PROMPT},{member}}}'.encode(), "/select_and_reserve")
    async with a_fleet({("1", 0): {0: range(4)}}) as fleet:
        name = json.loads(f"{{{member}}}")["selection_id"]
        for _ in range(2):
            answers = [await fleet.direct.ask(asked) for _ in range(8)]
            assert [status for status, *_ in answers] == [OK] + 7 * [b"HTTP/1.1 409 Conflict"]
            assert json.loads(answers[0][2])["selection_id"] == name
            assert await fleet.num_booked() == 1
            assert (await fleet.direct.ask(step_of(name, RELEASED, "?")))[0] == OK
        for _ in range(4):
            await fleet.reserved()  # on a direct connection again


async def test_records_of_large_fleets_are_those_of_the_routes() -> None:
    held = {(str(number), 0): {0: range(number // 4 + 1)} for number in range(20)}
    records = list[Any]()
    for is_direct in (False, True):
        async with a_fleet(held) as fleet:
            with heads_taken() as taken:
                records.append((await fleet.follow([{"token_ids": PROMPT}] * 4, is_direct=is_direct))[-1])
            assert len(taken) < 3  # the others are answered by a kernel, or by FastAPI
    assert records[0] == records[1]


async def test_a_record_has_the_cheapest_candidates_and_the_chosen_one() -> None:
    async with a_fleet({(str(number), 0): {0: range(number // 4 + 1)} for number in range(20)}) as fleet:
        await fleet.post("/select_and_reserve", token_ids=PROMPT, affinity_target={"worker_id": 0})
        decision = json.loads(fleet.records[-1])[3]
        workers = {worker for worker, *_ in decision[-1]}
        assert len(workers) == 16
        assert workers >= {"0", *map(str, range(8, 20))}


async def test_steps_that_a_direct_connection_pipelines_are_all_followed() -> None:
    async with a_fleet({("1", 0): {0: range(4)}}) as fleet:
        names = [(await fleet.reserved())["selection_id"] for _ in range(4)]
        fleet.direct.writer.write(b"".join(step_of(name, RELEASED) for name in names))
        assert [(await fleet.direct.answer())[0] for _ in names] == [OK] * len(names)
        assert await fleet.num_booked() == 0
        for step in (RELEASED, PREFILL_COMPLETE, OUTPUT_BLOCK):
            unknown = await fleet.direct.ask(step_of("x", step))
            assert unknown == await fleet.direct.ask(step_of("x", step, "?"))
            assert unknown[0] == b"HTTP/1.1 404 Not Found"


@pytest.mark.parametrize("step", [RELEASED, PREFILL_COMPLETE, OUTPUT_BLOCK])
async def test_a_step_ends_the_prefill_of_its_request_as_by_the_routes(step: str, taken: list[Head]) -> None:
    async with a_fleet({("1", 0): {}, ("2", 0): {}}) as fleet:
        for _ in range(4):  # then the steps are answered by a kernel
            name = (await fleet.reserved())["selection_id"]
            assert (await fleet.direct.ask(step_of(name, step)))[0] == OK
        found = list[Any]()
        for mark in ("", "?"):
            for name, worker in (("r", "1"), ("r/prefill", "2")):
                assert fleet.exchange.book.apply(reserved(name, worker, [1, 2], time.time()), time.time())
            begin = len(fleet.records)
            del taken[:]
            assert (await fleet.direct.ask(step_of("r", step, mark)))[0] == OK
            found.append((fleet.records[begin:], await fleet.loads()))
            assert not taken  # a kernel answers, or FastAPI
            assert ("r/prefill" in fleet.exchange.book) == (step == OUTPUT_BLOCK)
            for name in ("r", "r/prefill"):
                await fleet.direct.ask(step_of(name, RELEASED))
        assert found[0] == found[1]
        assert len(found[0][0]) == (1 if step == OUTPUT_BLOCK else 2)


@pytest.mark.parametrize("line", [b"Origin: http://evil.example\r\n", b"SEC-Fetch-Site: cross-site\r\n"])
async def test_a_page_of_another_site_books_nothing_and_ends_nothing(line: bytes) -> None:
    async with a_fleet({("1", 0): {0: range(4)}}) as fleet:
        names = [(await fleet.reserved())["selection_id"] for _ in range(4)]
        before = await fleet.loads()
        for data in (RESERVE, step_of(names[0], OUTPUT_BLOCK), step_of(names[0], RELEASED)):
            status, _, _ = await fleet.direct.ask(data.replace(b"\r\n\r\n", b"\r\n" + line + b"\r\n", 1))
            assert status == b"HTTP/1.1 403 Forbidden"
        assert await fleet.loads() == before


@pytest.mark.parametrize("steps", [[], [PREFILL_COMPLETE], [PREFILL_COMPLETE, OUTPUT_BLOCK]])
async def test_a_connection_becomes_direct_whatever_steps_follow_each_reservation(
    steps: list[str], taken: list[Head]
) -> None:
    async with a_fleet({("1", 0): {0: range(4)}}) as fleet:
        line = await fleet.connect()
        del taken[:]
        for _ in range(40):
            name = (await fleet.reserved(line))["selection_id"]
            for step in (*steps, RELEASED):
                status, _, answer = await line.ask(step_of(name, step))
                assert (status, answer) == (OK, b'{"status":"ok"}')
        assert await fleet.num_booked() == 0
        assert len(taken) < 10


async def test_each_step_of_a_direct_connection_needs_its_own_token() -> None:
    def with_token(data: bytes) -> bytes:
        return data.replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer s3cret\r\n\r\n", 1)

    async with a_fleet({("1", 0): {0: range(4)}}, api_token="s3cret") as fleet:
        reserved = [json.loads((await fleet.direct.ask(with_token(RESERVE)))[2]) for _ in range(8)]
        released = [step_of(each["selection_id"], RELEASED) for each in reserved]
        assert {(await fleet.direct.ask(with_token(each)))[0] for each in released[:4]} == {OK}
        for data in (released[4], released[5].replace(b"\r\n", b"\r\nAuthorization: Bearer other\r\n", 1)):
            assert (await fleet.direct.ask(data))[0] == b"HTTP/1.1 401 Unauthorized"
        assert {(await fleet.direct.ask(with_token(each)))[0] for each in released[4:]} == {OK}


async def test_a_step_with_a_body_is_never_taken_for_one_without() -> None:
    async with a_fleet({("1", 0): {0: range(4)}}) as fleet:
        name = (await fleet.reserved())["selection_id"]
        for _ in range(4):
            assert (await fleet.direct.ask(step_of(name, OUTPUT_BLOCK)))[0] == OK
        before = await fleet.loads()
        decayed = request(b'{"decay_fraction": 0.0}', f"/reservations/{name}/output_block")
        assert (await fleet.direct.ask(decayed))[0] == OK
        (model,) = json.loads(await fleet.loads())
        assert (
            model["loads"][0]["potential_decode_blocks"]
            == 0
            < json.loads(before)[0]["loads"][0]["potential_decode_blocks"]
        )


async def test_records_name_the_worker_of_the_answer_when_others_have_left() -> None:
    async with a_fleet({("0", 0): {0: range(1)}}) as fleet:
        streams = [Stream(str(number), block_size=BLOCK) for number in range(1, 4)]
        for stream in streams:
            await fleet.fed.hold(stream, PROMPT, {0: range(4)})
        await fleet.reserved()
        await fleet.fed.feed(streams[0].batch(degraded_reason=CLOSED))
        for _ in range(20):
            worker = str((await fleet.reserved())["worker_id"])
            decision = json.loads(fleet.records[-1])[3]
            assert worker in decision
            assert [name for name, *_ in decision[-1]] == ["0", "2", "3"]


@pytest.mark.parametrize("bound", [{"max_reservations": 35}, {"max_pages": 2**13 + PAGES}])
async def test_a_full_book_is_answered_as_by_the_routes(bound: dict[str, int]) -> None:
    async with a_fleet({("1", 0): {}}, bounds=bound) as fleet:
        answers = [await fleet.direct.ask(RESERVE) for _ in range(5)]
        assert {status for status, *_ in answers} == {OK}
        while answers[-1][0] == OK and len(answers) < 60:
            tokens = range(len(answers) << 16, (len(answers) << 16) + 600 * BLOCK)
            asked = request(body_of(token_ids=list(tokens)), "/select_and_reserve")
            answers.append(await fleet.direct.ask(asked if "max_pages" in bound else RESERVE))
        assert answers[-1][0] == b"HTTP/1.1 503 Service Unavailable"
        assert await fleet.num_booked() == len(answers) - 1


async def test_ranks_without_a_number_are_never_booked_by_a_kernel() -> None:
    async with a_fleet({(str(number), 0): {} for number in range(40)}, bounds={"max_places": 2}) as fleet:
        asked = [request(body_of(token_ids=[number] * BLOCK), "/select_and_reserve") for number in range(10)]
        answers = [await fleet.direct.ask(each) for each in asked]
        assert await fleet.num_booked() == len([status for status, *_ in answers if status == OK]) > 0


async def test_the_largest_records_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    made, shares = list[BookedChoices](), list[float]()

    def noted(*sizes: int) -> BookedChoices:
        made.append(make_choices(*sizes))
        return made[-1]

    def note_share() -> None:
        num_choices, _, num_bytes, *_ = made[-1].made.tolist()
        if num_choices > 1:
            room = len(made[-1].records) - 8 * MOST_HASHES - MARGIN
            shares.append(num_bytes / num_choices * MOST_CHOICES / room)

    monkeypatch.setattr("api.selection.direct.make_choices", noted)
    monkeypatch.setattr("selection.exchange.socket.gethostname", lambda: "h" * 64)
    monkeypatch.setattr("api.fast.kernel_connections._PASS_S", 1.0)
    largest = request(body_of(token_ids=PROMPT, session_id="s" * 256), "/select_and_reserve")
    longer = request(body_of(token_ids=PROMPT, session_id="s" * 257), "/select_and_reserve")
    held: dict[tuple[str, int], dict[int, range]] = {(f"{number:é>128}", 0): {} for number in range(20)}
    async with a_fleet(held) as fleet:
        fleet.window.on_choices = note_share
        lines = await fleet.lines(48)
        assert (await lines[0].ask(largest))[0] == OK
        for _ in range(3):
            for line in lines:
                line.writer.write(largest)
            names = [json.loads((await line.answer())[2])["selection_id"] for line in lines]
            assert len({*names}) == len(names)
        assert len(fleet.records) == 7 * len(lines) + 1
        for _ in range(4):
            assert (await fleet.direct.ask(longer))[0].startswith(b"HTTP/1.1 422 ")
        funnel = (await fleet.get("/funnel"))["all"]
        assert (funnel["requests"], funnel["prompt_tokens"]) == (len(fleet.records), len(PROMPT) * len(fleet.records))
    assert 0.5 < max(shares) < 1


@pytest.mark.parametrize("is_direct", [False, True])
async def test_a_name_that_is_reserved_again_is_the_same_request(is_direct: bool) -> None:
    mark = "" if is_direct else "?"
    async with a_fleet({("1", 0): {}}) as fleet:
        for name in "ababab":
            body = body_of(token_ids=PROMPT, selection_id=name)
            assert (await fleet.direct.ask(request(body, f"/select_and_reserve{mark}")))[0] == OK
            assert (await fleet.direct.ask(step_of(name, RELEASED)))[0] == OK
        assert (await fleet.get("/funnel"))["all"]["requests"] == 2


async def test_choices_are_in_the_book_if_nobody_can_be_told() -> None:
    async with a_fleet({("1", 0): {}}) as fleet:
        lines = await fleet.lines(8)
        fleet.window.on_choices = Mock(side_effect=RuntimeError)
        for line in lines:
            line.writer.write(RESERVE)
        await async_wait_until(lambda: len(fleet.exchange.book) == 5 * len(lines), what="the choices")
        assert await fleet.num_booked() == 5 * len(lines)


async def test_long_prompts_at_once_are_booked_whole() -> None:
    """A kernel books only some of them in one call."""
    long = list(range(1, 3001))
    async with a_fleet({("1", 0): {}}, block_size=1) as fleet:
        lines = await fleet.lines(8)
        for line in lines:
            line.writer.write(request(body_of(token_ids=long), "/select_and_reserve"))
        answers = [json.loads((await line.answer())[2]) for line in lines]
        assert {len(each["sequence_hashes"]) for each in answers} == {len(long)}
        decisions = [json.loads(each)[3] for each in fleet.records[-len(lines) :]]
        assert {len(base64.b64decode(decision[8])) for decision in decisions} == {8 * len(long)}


async def test_a_name_that_a_caller_took_before_leaves_nothing_behind() -> None:
    async with a_fleet({("1", 0): {0: range(4)}}) as fleet:
        for _ in range(4):
            last = (await fleet.reserved())["selection_id"]
        begin, _, number = last.rpartition("-")
        names = {f"{begin}-{each + 1}" for each in range(int(number) + 2)}
        for taken in sorted(names)[-2:]:
            assert await fleet.post("/select_and_reserve", token_ids=PROMPT, selection_id=taken) == OK
        names |= {(await fleet.reserved())["selection_id"] for _ in range(3)}
        for name in names:
            assert (await fleet.direct.ask(step_of(name, RELEASED)))[0] == OK
        assert await fleet.num_booked() == 0
