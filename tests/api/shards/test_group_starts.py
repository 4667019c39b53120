"""What a member of a group logs of Kafka's client when a group begins, and when it cannot."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.support.engines.publishing_process import PublishingProcess
from tests.support.servers.kafka_broker import KafkaBroker
from tests.support.servers.service_process import ServiceProcess, own_topics
from tests.support.waiting import wait_until

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


def test_a_broker_that_never_gets_ready_for_groups_is_an_error(tmp_path: Path) -> None:
    """Its internal topic shall have more replicas than there are brokers."""
    broker = KafkaBroker(tmp_path, more="offsets.topic.replication.factor=3")
    try:
        broker.restart()
        settings = own_topics(broker.bootstrap)
        with PublishingProcess("w", **settings), ServiceProcess(tmp_path, **settings, KVSIGHT_GROUP="m") as service:
            wait_until(lambda: lines(service) != [], 60, "the error")
            assert "ERROR aiokafka.consumer.group_coordinator: Group Coordinator Request failed" in lines(service)[0]
    finally:
        broker.kill()
