"""The /dump route and the order of its pages."""

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_events.kernels.prefix_order import prefix_order
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream, stored

TOKENS = list(range(1, 17))


async def test_nothing_held_is_an_empty_dump(client: httpx.AsyncClient) -> None:
    assert (await client.get("/dump")).json() == {}


async def test_a_dump_has_the_peers_shape(client: httpx.AsyncClient, fed: HandFed) -> None:
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


@pytest.mark.parametrize("step", [1, -1])
def test_a_chain_is_followed_in_either_direction(step: int) -> None:
    hashes = np.arange(1, 6, dtype=np.uint64)[::step]
    assert hashes[prefix_order(hashes, hashes - np.uint64(1))].tolist() == [1, 2, 3, 4, 5]


def test_a_loop_of_parents_ends() -> None:
    hashes, parents = np.array([1, 2, 3], np.uint64), np.array([2, 1, 3], np.uint64)
    assert sorted(prefix_order(hashes, parents).tolist()) == [0, 1, 2]
