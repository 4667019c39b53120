"""How partitions are shared out among members, and how a group starts."""

import inspect
import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiokafka.consumer import group_coordinator

from indexer.progress import Progress
from indexer.shards.assignment import Candidate, decode_assignment, decode_candidate, encode, share_out
from kv_events.kafka import connection
from kv_events.records import LogRecord
from tests.support.engines.publishing_process import PublishingProcess
from tests.support.servers.kafka_broker import KafkaBroker
from tests.support.servers.service_process import ServiceProcess, own_topics
from tests.support.waiting import wait_until

NOW_MS = 1_800_000_000_000


def candidate(name: str, generation: int = 0, url: str = "") -> Candidate:
    return Candidate(name, url or f"http://{name}:1", generation, [])


def test_a_partition_that_is_given_up_does_not_delay_the_others() -> None:
    progress = Progress()
    progress.start({0: 0, 1: 0}, {0: 1, 1: 9})
    progress.advance(LogRecord(0, 0, 0, b"", b""))
    assert not progress.catches_up()
    progress.remove(1)
    assert progress.catches_up()
    assert progress.lag() == 0


@pytest.mark.parametrize("generation", [2**53 - 1, NOW_MS + 10**9])
def test_a_generation_of_the_far_future_does_not_stay(generation: int) -> None:
    with_stranger = share_out([candidate("a", NOW_MS - 5), candidate("stranger", generation)], range(4), NOW_MS)
    assert (with_stranger.generation, with_stranger.before) == (NOW_MS, NOW_MS - 5)
    assert decode_assignment(encode(with_stranger)) == with_stranger
    assert sorted(with_stranger.owners()) == [0, 1, 2, 3]


@pytest.mark.parametrize("generation", [-1, 2**53, 2**64 - 1])
def test_other_generations_are_not_read(generation: int) -> None:
    assert decode_candidate(encode(candidate("a", generation))) is None
    assert decode_candidate(encode(candidate("a", NOW_MS))) == candidate("a", NOW_MS)


def test_two_members_with_one_id_leave_no_partition_without_a_member() -> None:
    shared = share_out([candidate("a"), candidate("a", url="http://other:1"), candidate("b")], range(5), NOW_MS)
    assert sorted(shared.owners()) == [0, 1, 2, 3, 4]
    assert [member.id for member in shared.members] == ["a", "b"]


pytestmark = pytest.mark.timing("members must join their group within seconds")


def lines(*services: ServiceProcess) -> list[str]:
    return [line for each in services for line in each.log.read_text().splitlines() if "aiokafka" in line]


def has_two_members(service: ServiceProcess) -> bool:
    return " 2 members" in service.log.read_text()


def test_the_first_group_of_a_broker_and_a_second_member_are_no_errors(
    kafka_broker: KafkaBroker, tmp_path: Path
) -> None:
    settings = own_topics(kafka_broker.bootstrap)
    group = settings | {"KVSIGHT_GROUP": "members"}
    with ServiceProcess(tmp_path, **group) as first, PublishingProcess("w", **settings):
        wait_until(lambda: "1 members" in first.log.read_text(), 60, "a group")
        with ServiceProcess(tmp_path, **group) as second:
            for each in (first, second):
                wait_until(partial(has_two_members, each), 60, "both members")
            assert lines(first, second) == []


def test_a_broker_that_never_gets_ready_for_groups_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """aiokafka repeats a line then. It passes once it has been repeated for longer than while a group begins."""
    template, now = "Group Coordinator Request failed", 0.0
    assert template in inspect.getsource(group_coordinator)
    monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=lambda: now))
    lines, line = connection._OncePerPeriod(), logging.makeLogRecord({"msg": template, "levelno": logging.ERROR})
    passed = []
    for now in (0.0, 8.0, 25.0, 32.0, 34.9, 35.1, 36.0):
        passed += [now] if lines.filter(line) else []
    assert passed == [35.1]
