"""GET /workers, the view of a worker, resyncs on demand, and GET /dump."""

from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.problems import ProblemError
from api.view_source import stream_pages
from api.workers.routes import _radix_view
from indexer.slices import run_at_once
from kv_events.http.workers import WorkerRecord
from kv_events.kernels.prefix_order import prefix_order
from kv_events.schema import ResyncRequest
from tests.support.http_checks import check_problem
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream, digest_of, stored
from tests.support.loop_watch import check_turns
from tests.support.waiting import async_wait_until

TOKENS = list(range(1, 17))


async def test_workers_have_the_peers_shape_and_more(client: httpx.AsyncClient, fed: HandFed) -> None:
    stream = Stream("1")
    await fed.hold(stream, TOKENS, {0: range(4), 2: range(1)})
    await fed.hold(Stream("1", dp_rank=1), TOKENS[:4])
    (worker,) = (await client.get("/workers")).json()
    listeners = worker.pop("listeners")
    assert worker.pop("age_ms") >= 0
    record = WorkerRecord(worker_id=1, model_name="m")
    assert worker == msgspec.to_builtins(record) | {
        "instance_id": "1",
        "source": "log",
        "status": "active",
        "model_name": "m",
        "routing_group": "default",
        "block_size": 4,
        "endpoints": {"0": "default/m/1/0", "1": "default/m/1/1"},
        "state": "live",
        "groups": {},
    }
    assert listeners["0"]["pages"] == {"GPU": 4, "CPU_PINNED": 0, "DISK": 1, "EXTERNAL": 0}
    assert listeners["0"]["digest"] == digest_of(stream.held).hex()
    assert (listeners["0"]["epoch"], listeners["0"]["seq"], listeners["0"]["status"]) == (1, 0, "active")
    assert listeners["0"]["counters"]["pages_stored"] == 5


async def test_a_stale_rank_shows_why_and_makes_the_worker_stale(client: httpx.AsyncClient, fed: HandFed) -> None:
    await fed.hold(Stream("1"), TOKENS)
    broken = Stream("1", dp_rank=1)
    await fed.feed(broken.batch(stored((0, [5])), digest=bytes(64)))
    (worker,) = (await client.get("/workers")).json()
    assert worker["state"] == "stale"
    assert {rank: each["stale_reason"] for rank, each in worker["listeners"].items()} == {"0": "", "1": "new"}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, ["a", "b"]),
        ({"model_name": "m"}, ["a"]),
        ({"routing_group": "t"}, ["b"]),
        ({"model_name": "m", "routing_group": "t"}, []),
        ({"model_name": "nope"}, []),
    ],
)
async def test_workers_are_filtered(
    client: httpx.AsyncClient, fed: HandFed, params: dict[str, str], expected: list[str]
) -> None:
    await fed.hold(Stream("a"), TOKENS)
    await fed.hold(Stream("b", model="m2", tenant="t"), TOKENS)
    answer = (await client.get("/workers", params=params)).json()
    assert [each["instance_id"] for each in answer] == expected


async def test_a_radix_view_names_every_page_once(client: httpx.AsyncClient, fed: HandFed) -> None:
    hashes = await fed.hold(Stream("pod/1"), list(range(360)), {0: range(90), 3: range(50)})
    await fed.hold(Stream("other"), list(range(4000, 4100)))
    pages, cursor, calls = [], 0, 0
    while cursor is not None:
        answer = (await client.get("/workers/pod/1/view", params={"limit": 30, "cursor": cursor})).json()
        assert answer["num_pages"] == len(answer["pages"]) <= 30
        pages += answer["pages"]
        cursor, calls = answer["next_cursor"], calls + 1
    assert calls == 3  # the last part is full
    assert (answer["epoch"], answer["seq"], answer["state"], answer["block_size"]) == (1, 0, "live", 4)
    media = {hashes[i]: ["GPU", "EXTERNAL"] if i < 50 else ["GPU"] for i in range(90)}
    assert {page["sequence_hash"]: page["media"] for page in pages} == media
    parents = {page["sequence_hash"]: page["parent"] for page in pages}
    assert parents == dict(zip(hashes, [None, *hashes], strict=False))


async def test_a_stream_that_is_forgotten_while_it_is_read_is_a_404(client: httpx.AsyncClient, fed: HandFed) -> None:
    stream = Stream("1")
    await fed.hold(stream, TOKENS)
    await fed.hold(Stream("2"), TOKENS)
    views = fed.consumer.namespaces
    view = views.view(stream.id)
    assert view is not None
    reading = _radix_view(fed.consumer, view, limit=1000, cursor=0)
    reading.send(None)  # run until the pause after the first slice
    run_at_once(views.forget(stream.id))
    with pytest.raises(ProblemError, match=stream.id.key) as caught:
        reading.send(None)
    assert caught.value.status == 404
    assert [held async for held in stream_pages(fed.consumer, view)] == []
    assert [each["instance_id"] for each in (await client.get("/workers")).json()] == ["2"]


async def test_many_workers_never_hold_up_the_loop(client: httpx.AsyncClient, fed: HandFed) -> None:
    await fed.feed(*(Stream(f"w{number}").batch() for number in range(3000)))

    answers = []

    async def ask() -> None:
        answers.append(await client.get("/workers"))

    # a slice takes one millisecond, the whole answer about a hundred
    await check_turns(ask, lambda turns: max(turns) < sum(turns) / 3)
    names = [each["instance_id"] for each in msgspec.json.decode(answers[-1].content)]
    assert sorted(names) == sorted(f"w{number}" for number in range(3000))


async def test_an_unknown_worker_is_a_404_that_names_the_known(client: httpx.AsyncClient, fed: HandFed) -> None:
    await fed.hold(Stream("1"), TOKENS)
    for response in (await client.get("/workers/9/view"), await client.post("/workers/9/resync")):
        problem = check_problem(response, 404)
        assert "default/m/1/0" in problem["detail"]
        assert (problem["field"], problem["value"]) == ("worker", "9")


async def test_a_worker_with_several_streams_needs_a_rank(client: httpx.AsyncClient, fed: HandFed) -> None:
    await fed.hold(Stream("1"), TOKENS)
    await fed.hold(Stream("1", dp_rank=1), TOKENS[:4])
    assert "default/m/1/1" in check_problem(await client.get("/workers/1/view"), 400)["detail"]
    answer = (await client.get("/workers/1/view", params={"dp_rank": 1})).json()
    assert (answer["dp_rank"], answer["num_pages"]) == (1, 1)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"dp_rank": "x"}, "dp_rank"),
        ({"limit": 0}, "limit"),
        ({"cursor": -1}, "cursor"),
        ({"cursor": 10**30}, "cursor"),
    ],
)
async def test_a_bad_parameter_is_named(
    client: httpx.AsyncClient, fed: HandFed, params: dict[str, Any], field: str
) -> None:
    await fed.hold(Stream("1"), TOKENS)
    problem = check_problem(await client.get("/workers/1/view", params=params), 422)
    assert problem["field"] == field
    assert f"{field}: got '{params[field]}', expected" in problem["detail"]


async def test_a_resync_on_demand_reaches_the_publisher(client: httpx.AsyncClient, fed: HandFed) -> None:
    requests: list[ResyncRequest] = []
    fed.log.listen(requests.append)
    await fed.hold(Stream("1"), TOKENS)
    response = await client.post("/workers/1/resync")
    await async_wait_until(lambda: requests, what="a resync request")
    assert (response.status_code, response.json()) == (202, {"status": "requested", "streams": ["default/m/1/0"]})
    assert (requests[0].stream, requests[0].reason) == ("default/m/1/0", "operator")


async def test_a_dump_has_the_peers_shape(client: httpx.AsyncClient, fed: HandFed) -> None:
    assert (await client.get("/dump")).json() == {}
    await fed.feed(Stream("1", dp_rank=3).batch(stored((0, [101]))))
    answer = (await client.get("/dump")).json()
    block = {"block_hash": 101, "tokens_hash": None, "mm_extra_info": None}
    stored_event = {"parent_hash": None, "start_position": None, "blocks": [block]}
    assert answer == {
        "m:default": {
            "block_size": 4,
            "events": [
                {
                    "worker_id": "1",
                    "storage_tier": "device",
                    "residency_domain": "worker",
                    "event": {"event_id": 0, "data": {"stored": stored_event}, "dp_rank": 3},
                }
            ],
        }
    }


async def test_a_dump_rebuilds_every_view_parents_first(client: httpx.AsyncClient, fed: HandFed) -> None:
    first, second = Stream("1"), Stream("2", block_size=8)
    hashes = await fed.hold(first, list(range(4 * 700)), {1: range(600, 700), 0: range(700)})
    await fed.hold(second, TOKENS)
    answer = (await client.get("/dump")).json()
    assert {name: part["block_size"] for name, part in answer.items()} == {"m:default:4": 4, "m:default:8": 8}
    held, known = set(), {None}
    for event in answer["m:default:4"]["events"]:
        stored_event = event["event"]["data"]["stored"]
        (block,) = stored_event["blocks"]
        assert stored_event["parent_hash"] in known
        known.add(block["block_hash"])
        held.add((block["block_hash"], ["device", "host_pinned", "disk", "external"].index(event["storage_tier"])))
    assert held == first.held
    assert len(hashes) == 700
    assert len(answer["m:default:8"]["events"]) == 2


@given(st.lists(st.integers(0, 30), min_size=0, max_size=40, unique=True), st.data())
def test_no_page_comes_before_its_parent(numbers: list[int], data: st.DataObject) -> None:
    """The pages form a forest: the parent of a page is an earlier page in `numbers`, or a page that is not listed."""
    hashes = [number + 1 for number in numbers]
    parents = [data.draw(st.sampled_from([0, 999, *hashes[:i]])) for i in range(len(hashes))]
    shuffled = data.draw(st.permutations(range(len(hashes))))
    ours = np.array([hashes[i] for i in shuffled], np.uint64)
    theirs = np.array([parents[i] for i in shuffled], np.uint64)
    order = prefix_order(ours, theirs).tolist()
    assert sorted(order) == list(range(len(hashes)))
    place = {int(ours[i]): position for position, i in enumerate(order)}
    assert all(place.get(int(theirs[i]), -1) < place[int(ours[i])] for i in order)


def test_a_loop_of_parents_ends() -> None:
    hashes, parents = np.array([1, 2, 3], np.uint64), np.array([2, 1, 3], np.uint64)
    assert sorted(prefix_order(hashes, parents).tolist()) == [0, 1, 2]
