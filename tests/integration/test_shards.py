"""Members of a group share the partitions of a topic: any of them answers for all, while members come and go.

A real broker, real publisher processes and real `kvsight serve` processes.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.support.engines.publishing_process import MODEL, PublishingProcess
from tests.support.servers.service_process import ServiceProcess, own_topics
from tests.support.waiting import wait_until

WORKERS = [f"w{number}" for number in range(4)]


def group_of(kafka: str, **more: object) -> dict[str, Any]:
    return own_topics(
        kafka, KVSIGHT_GROUP=f"group-{uuid.uuid4().hex}", KVSIGHT_TOPIC_PARTITIONS=4, KVSIGHT_GROUP_DEADLINE_S=5, **more
    )


def of_publishers(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if "GROUP" not in name}


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


def is_shared_out(service: ServiceProcess) -> bool:
    """Whether a member has two partitions, is up to date, and keeps none that another one has taken over."""
    shards = service.get("/shards").json()
    return list(shards["claims"].values()) == [True, True] and not shards["lent"] and not shards["missing"]


async def test_a_killed_member_is_taken_over_and_comes_back(kafka_bootstrap: str, tmp_path: Path) -> None:
    await asyncio.to_thread(check_a_killed_member, group_of(kafka_bootstrap), tmp_path)


def check_a_killed_member(settings: dict[str, Any], folder: Path) -> None:
    with (
        engines(settings),
        ServiceProcess(folder, **settings) as first,
        ServiceProcess(folder, **settings) as second,
    ):
        wait_until(lambda: is_shared_out(first) and is_shared_out(second), 60, "two partitions each")
        assert answers_for_all(first)
        assert answers_for_all(second)

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

        second.start()
        wait_until(lambda: is_shared_out(first) and is_shared_out(second), 60, "two partitions each, again")
        assert answers_for_all(first)
        assert answers_for_all(second)
