"""Members of a group share the partitions of a topic: any of them answers for all, while members come and go.

A real broker, real publisher processes and real `kvsight serve` processes.
"""

import asyncio
import inspect
import logging
import os
import re
import signal
import ssl
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from aiokafka.consumer import group_coordinator

from api.shards.wire import ShardPrompt, ShardReply, ShardRequest, decode_reply, encode
from kv_events.kafka import connection
from tests.rigs.raw_http import body_of, connecting, every_kind, request, run
from tests.support.engines.publishing_process import MODEL, PublishingProcess
from tests.support.servers.certificates import Certificates
from tests.support.servers.child_process import free_port
from tests.support.servers.kafka_broker import KafkaBroker
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
    async with connecting(service.url) as connect:
        one_by_one, at_once = await connect(), await connect()
        expected = [await one_by_one.ask(each, pieces=1 + number % 3) for number, each in enumerate(kinds)]
        assert b'"w3"' in expected[0][2]
        at_once.writer.write(b"".join(kinds))
        assert [await at_once.answer() for _ in kinds] == expected
        at_once.writer.write(by_hash)
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

        logged = len(first.log.read_text())  # it may have loaded its own partitions when the other one joined
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
        taken_over = set(
            map(int, re.findall(r"partition (\d): snapshot of \d views? loaded", first.log.read_text()[logged:]))
        )
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


PARTITIONS = 6
SPREAD_WORKERS = ["w15", "w0", "w2", "w24", "w3", "w9"]
"""One in each partition."""
ROUTER, MEMBER = "router-0123456789abcdef", "member-0123456789abcdef"
QUERY = {"model_name": MODEL, "seq_hashes": [1, 2]}


@contextmanager
def spread_engines(topics: dict[str, Any]) -> Iterator[None]:
    """Workers that hold the same two pages."""
    with ExitStack() as stack:
        for worker in SPREAD_WORKERS:
            stack.enter_context(PublishingProcess(worker, **topics)).store(1, 2)
        yield


def test_three_members_talk_over_tls_with_a_token_of_their_own(kafka_bootstrap: str, tmp_path: Path) -> None:
    certificates, folder = Certificates(tmp_path / "certificates"), tmp_path
    issued = certificates.issue("member")
    tokens, right, wrong = folder / "tokens.toml", folder / "right", folder / "wrong"
    tokens.write_text(
        f'[router]\ntoken = "{ROUTER}"\nscopes = ["read"]\n[member]\ntoken = "{MEMBER}"\nscopes = ["read"]\n'
    )
    right.write_text(MEMBER)
    wrong.write_text("another-0123456789abcdef")
    topics = own_topics(kafka_bootstrap, KVSIGHT_TOPIC_PARTITIONS=PARTITIONS)
    settings = topics | {
        "KVSIGHT_GROUP": f"group-{uuid.uuid4().hex}",
        "KVSIGHT_GROUP_DEADLINE_S": 10,
        "KVSIGHT_GROUP_CA_FILE": certificates.ca,
        "KVSIGHT_TLS_CERT_FILE": issued.cert,
        "KVSIGHT_TLS_KEY_FILE": issued.key,
        "KVSIGHT_API_TOKENS_FILE": tokens,
        "SSL_CERT_FILE": certificates.ca,
    }
    trusted = ssl.create_default_context(cafile=str(certificates.ca))
    headers = {"Authorization": f"Bearer {ROUTER}"}
    with (
        spread_engines(topics),
        ServiceProcess(folder, **settings, KVSIGHT_GROUP_TOKEN_FILE=right) as first,
        ServiceProcess(folder, **settings, KVSIGHT_GROUP_TOKEN_FILE=right) as second,
        ServiceProcess(folder, **settings, KVSIGHT_GROUP_TOKEN_FILE=wrong) as third,
        httpx.Client(verify=trusted, headers=headers, timeout=60) as client,
    ):

        def answer(service: ServiceProcess) -> dict[str, Any]:
            found: dict[str, Any] = client.post(f"{service.url}/query_by_hash", json=QUERY).json()
            return found

        def has_all(service: ServiceProcess) -> bool:
            found = answer(service)
            return sorted(found.get("instances", {})) == sorted(SPREAD_WORKERS) and "missing" not in found

        def members_of(service: ServiceProcess) -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = client.get(f"{service.url}/shards").json().get("members", [])
            return found

        wait_until(lambda: len(members_of(first)) == 3, 90, "three members")
        wait_until(lambda: has_all(first) and has_all(second), 90, "answers of three members")
        members = members_of(first)
        assert sorted(len(member["partitions"]) for member in members) == [2, 2, 2]
        assert {member["url"] for member in members} == {first.url, second.url, third.url}

        def missing_for_third() -> list[str]:
            """It lacks its own partitions, too, until it has read them."""
            return sorted(each["member"] for each in answer(third).get("missing", []))

        wait_until(lambda: missing_for_third() == sorted([first.url, second.url]), 60, "an answer of the third member")
        refused = answer(third)
        assert len(refused["instances"]) < len(SPREAD_WORKERS)
        assert all("401" in each["reason"] for each in refused["missing"])
        assert httpx.post(f"{first.url}/query_by_hash", json=QUERY, verify=trusted).status_code == 401
        logs = first.log.read_text() + second.log.read_text() + third.log.read_text()
    assert [secret for secret in (ROUTER, MEMBER, wrong.read_text()) if secret in logs] == []


def test_a_tenant_that_asks_too_often_is_refused_by_each_member(kafka_bootstrap: str, tmp_path: Path) -> None:
    limits = tmp_path / "limits.toml"
    limits.write_text("[default]\nqueries_per_s = 0.001\n")
    topics = own_topics(kafka_bootstrap, KVSIGHT_TOPIC_PARTITIONS=2)
    settings = topics | {"KVSIGHT_GROUP": f"group-{uuid.uuid4().hex}", "KVSIGHT_TENANT_LIMITS_FILE": limits}
    with PublishingProcess("w", **topics) as engine, ServiceProcess(tmp_path, **settings) as service:
        engine.store(1, 2)
        wait_until(lambda: service.pages("w") == {1, 2}, 60, "the pages")
        answers = [service.query(MODEL, [1, 2]) for _ in range(3)]
        # the first one is not counted: only tenants of known models are
        assert [each.status_code for each in answers] == [200, 200, 429]
        assert answers[2].json()["type"].endswith("tenant-limit")


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
        wait_until(lambda: ", 1 member\n" in first.log.read_text(), 60, "a group")
        with ServiceProcess(tmp_path, **group) as second:
            for each in (first, second):
                wait_until(partial(has_two_members, each), 60, "both members")
            assert lines(first, second) == []


def test_a_member_that_has_not_joined_answers_no_query(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path, KVSIGHT_KAFKA=f"127.0.0.1:{free_port()}", KVSIGHT_GROUP="g") as service:
        for path in ("/query", "/query/batch"):
            answer = service.post(path, {"model_name": MODEL, "token_ids": [1, 2, 3, 4], "queries": []})
            assert answer.status_code == 503
            assert "has not joined the consumer group g yet" in answer.json()["detail"]


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
