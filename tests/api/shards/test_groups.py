"""Members of a group share the partitions of a topic: any of them answers for all, while members come and go.

A real broker, real publisher processes and real `kvsight serve` processes.
"""

import asyncio
import os
import re
import signal
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from api.shards.wire import ShardPrompt, ShardReply, ShardRequest, decode_reply, encode
from tests.rigs.raw_http import Line, body_of, every_kind, request, run
from tests.support.engines.publishing_process import MODEL, PublishingProcess
from tests.support.servers.service_process import ServiceProcess, own_topics
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timing("members must take over partitions within seconds")

WORKERS = [f"w{number}" for number in range(4)]


def group_of(kafka: str, **more: object) -> dict[str, Any]:
    ours = {"KVSIGHT_TOPIC_PARTITIONS": 4, "KVSIGHT_GROUP_DEADLINE_S": 5, "KVSIGHT_GROUP_SESSION_S": 3}
    return own_topics(kafka, KVSIGHT_GROUP=f"group-{uuid.uuid4().hex}", **ours | more)


def of_publishers(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if "GROUP" not in name and "SNAPSHOT" not in name}


@contextmanager
def engines(settings: dict[str, Any]) -> Iterator[list[PublishingProcess]]:
    """Four workers that hold 1 .. 4 pages of a prompt."""
    with ExitStack() as stack:
        found = [stack.enter_context(PublishingProcess(worker, **of_publishers(settings))) for worker in WORKERS]
        for number, engine in enumerate(found):
            engine.store(*range(1, number + 2))
        yield found


EVERYTHING = {worker: number + 1 for number, worker in enumerate(WORKERS)}


def pages_of(answer: dict[str, Any]) -> dict[str, int]:
    """Worker -> pages of the prompt."""
    return {name: each["longest_matched"] // 4 for name, each in answer["instances"].items()}


def answers_for_all(service: ServiceProcess) -> bool:
    answer = service.query(MODEL, [1, 2, 3, 4])
    return answer.is_success and "missing" not in answer.json() and pages_of(answer.json()) == EVERYTHING


def check_the_routes_about_workers(first: ServiceProcess, second: ServiceProcess) -> None:
    for service in (first, second):
        assert [each["instance_id"] for each in service.get("/workers").json()] == WORKERS
        assert [service.pages(worker) for worker in WORKERS] == [{1}, {1, 2}, {1, 2, 3}, {1, 2, 3, 4}]
        assert service.get("/workers/w9/view").status_code == 404
    resyncs = [service.listener("w0")["counters"]["resyncs"] for service in (first, second)]
    for service in (first, second):
        assert httpx.post(f"{service.url}/workers/w0/resync", timeout=60).status_code == 202
    wait_until(lambda: first.listener("w0")["counters"]["resyncs"] > max(resyncs), 60, "a resync")


def check_what_members_ask_each_other(service: ServiceProcess) -> None:
    """A question with a length is answered at once, one in chunks by FastAPI."""

    def told(body: bytes, *, in_chunks: bool) -> ShardReply:
        content = iter([body]) if in_chunks else body
        headers = {"Content-Type": "application/msgpack"}
        answer = httpx.post(f"{service.url}/shards/query", content=content, headers=headers, timeout=60)
        assert (answer.status_code, answer.headers["Content-Type"]) == (200, "application/msgpack")
        return decode_reply(answer.content)

    def without_ages(told: ShardReply) -> ShardReply:
        for found in told.found:
            found.rows[:] = [msgspec.structs.replace(row, age_ms=0) for row in found.rows]
        return told

    one = ShardPrompt(MODEL, "default", {4: np.arange(1, 5, dtype="<u8").tobytes()})
    for asks in ([], [one], [one, ShardPrompt("unknown", "default", {})]):
        body = encode(ShardRequest(0, asks))
        at_once, by_fastapi = (without_ages(told(body, in_chunks=in_chunks)) for in_chunks in (False, True))
        assert at_once == by_fastapi
        assert len(at_once.found) == len(asks)
    assert at_once.found[0].rows
    bad = httpx.post(f"{service.url}/shards/query", content=b"\xc1", headers={"Content-Type": "application/msgpack"})
    assert bad.status_code == 400


async def check_many_requests_of_one_connection(service: ServiceProcess) -> None:
    """Answers come in the order of the requests, although those to queries wait for the other member."""
    by_hash = request(body_of(seq_hashes=[1, 2, 3, 4]), "/query_by_hash")
    kinds = [by_hash, by_hash, *every_kind()] * 4
    one_by_one, at_once = await Line.connect(service.url), await Line.connect(service.url)
    expected = [await one_by_one.ask(each, pieces=1 + number % 3) for number, each in enumerate(kinds)]
    assert b'"w3"' in expected[0][2]
    at_once.writer.write(b"".join(kinds))
    assert [await at_once.answer() for _ in kinds] == expected
    at_once.writer.write(by_hash)
    await at_once.close()
    await one_by_one.close()
    assert answers_for_all(service)


def is_shared_out(service: ServiceProcess) -> bool:
    """Whether a member has two partitions, is up to date, and keeps none that another one has taken over."""
    shards = service.get("/shards").json()
    return list(shards["claims"].values()) == [True, True] and not shards["lent"] and not shards["missing"]


async def test_a_killed_member_is_taken_over_and_comes_back(kafka_bootstrap: str, tmp_path: Path) -> None:
    snapshots = {"KVSIGHT_SNAPSHOT_DIR": tmp_path / "snapshots", "KVSIGHT_SNAPSHOT_INTERVAL_S": 0.5}
    await asyncio.to_thread(check_a_killed_member, group_of(kafka_bootstrap, **snapshots), tmp_path)


def check_a_killed_member(settings: dict[str, Any], folder: Path) -> None:
    with engines(settings), ServiceProcess(folder, **settings) as first, ServiceProcess(folder, **settings) as second:
        wait_until(lambda: is_shared_out(first) and is_shared_out(second), 60, "two partitions each")
        assert answers_for_all(first)
        assert answers_for_all(second)

        check_the_routes_about_workers(first, second)
        check_what_members_ask_each_other(first)
        run(check_many_requests_of_one_connection(second))
        wait_until(lambda: len(list(folder.glob("snapshots/*.kvsnap"))) == 4, 60, "a snapshot of each partition")

        second.kill()
        seen = set()
        while True:
            answer = first.query(MODEL, [1, 2, 3, 4])
            assert answer.status_code == 200, answer.text
            found = answer.json()
            if "missing" not in found:
                assert pages_of(found) == EVERYTHING
                break
            seen |= {p for each in found["missing"] for p in each["partitions"]}
            assert pages_of(found).items() <= EVERYTHING.items()
        assert len(seen) == 2
        taken_over = set(map(int, re.findall(r"partition (\d): snapshot of \d views? loaded", first.log.read_text())))
        assert taken_over == seen

        second.start()
        wait_until(lambda: is_shared_out(first) and is_shared_out(second), 60, "two partitions each, again")
        assert answers_for_all(first)
        assert answers_for_all(second)


async def test_a_member_that_hangs_is_given_up_and_does_not_answer_for_what_it_lost(
    kafka_bootstrap: str, tmp_path: Path
) -> None:
    await asyncio.to_thread(check_a_hanging_member, group_of(kafka_bootstrap, KVSIGHT_GROUP_DEADLINE_S=1), tmp_path)


def check_a_hanging_member(settings: dict[str, Any], folder: Path) -> None:
    with (
        engines(settings) as workers,
        ServiceProcess(folder, **settings) as first,
        ServiceProcess(folder, **settings) as second,
    ):
        wait_until(lambda: is_shared_out(first) and is_shared_out(second), 60, "two partitions each")
        os.kill(second.pid, signal.SIGSTOP)
        try:
            (missing,) = first.query(MODEL, [1, 2, 3, 4]).json()["missing"]
            assert (len(missing["partitions"]), missing["member"]) == (2, second.url)
            assert missing["reason"] == "no answer within 1 s"
            wait_until(lambda: answers_for_all(first), 60, "the other member to take over")
            for engine in workers:
                engine.remove(1)
            wait_until(lambda: not first.query(MODEL, [1, 2, 3, 4]).json()["instances"], 60, "the removals")
        finally:
            os.kill(second.pid, signal.SIGCONT)
        # what the second one holds is of the time before it hung, and the first one has it now
        assert second.query(MODEL, [1, 2, 3, 4]).json()["instances"] == {}
        wait_until(lambda: is_shared_out(first) and is_shared_out(second), 60, "two partitions each, again")
        for engine in workers:
            engine.store(1)
        expected = {worker: max(1, number + 1) for number, worker in enumerate(WORKERS)}
        for service in (first, second):
            wait_until(
                lambda asked=service: pages_of(asked.query(MODEL, [1, 2, 3, 4]).json()) == expected,  # type: ignore[misc]
                60,
                "the stores",
            )
