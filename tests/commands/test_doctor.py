"""`kvsight doctor` with a real broker, Redis and service: a broken part is the one that it names.

The engine is simulated; its events go through the real plug-in, or through ZMQ to the real bridge.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from kv_events.kafka.connection import KafkaConnection
from kv_events.kafka.settings import KafkaSettings
from kv_events.kafka.topics import inspect_topics
from kvsight import Client
from kvsight.cli.main import app
from kvsight.cli.shared.engine_client import EngineClient, EngineError
from tests.support.commands import kvsight
from tests.support.engines.publishing_process import PublishingProcess
from tests.support.engines.simulated_engine import SimulatedEngine
from tests.support.servers.child_process import free_port
from tests.support.servers.scripted_server import Reply, scripted
from tests.support.servers.service_process import ServiceProcess, own_topics
from tests.support.waiting import wait_until

CHECKS = ["broker", "topics", "retention", "Redis", "service", "engine"]
CHECKS += ["events", "clocks", "block size", "hash seed", "answer"]
WAIT_S = 2


class Chain(NamedTuple):
    """A deployment in which everything works."""

    topics: dict[str, Any]
    service: ServiceProcess
    engine: SimulatedEngine
    redis_url: str

    def examine(self, *flags: object, **changed: object) -> Findings:
        """Run the command for the whole chain. changed: other values of the flags; None leaves a flag out."""
        usual = {"url": self.service.url, "engine": self.engine.url, "redis": self.redis_url, "wait": WAIT_S} | changed
        return examine(self.topics, *flags, **usual)


class Findings(NamedTuple):
    """What the command found."""

    code: int
    broken: str | None
    states: dict[str, str]
    details: dict[str, str]
    remedy: str


def examine(environment: dict[str, Any], *flags: object, **values: object) -> Findings:
    typed = [part for name, value in values.items() if value is not None for part in (f"--{name}", value)]
    words = ["doctor", "--json", *map(str, (*typed, *flags))]
    if "KVSIGHT_HASH_SEED" in environment:  # which a process reads once
        ran = kvsight(*words, environment=environment)
        code, out, err = ran.returncode, ran.stdout, ran.stderr
    else:
        done = CliRunner().invoke(app, words, env={name: str(value) for name, value in environment.items()})
        code, out, err = done.exit_code, done.stdout, done.stderr
    assert out, err
    found: dict[str, Any] = json.loads(out)
    checks = found["checks"]
    assert [each["check"] for each in checks] == CHECKS[: len(checks)]
    states = {each["check"]: each["state"] for each in checks}
    return Findings(
        code,
        found["broken"],
        states,
        {each["check"]: each["detail"] for each in checks},
        checks[-1]["remedy"],
    )


def assert_broken(found: Findings, check: str, *words: str) -> None:
    """Exactly this check has failed, with these words, and there is something to do."""
    assert (found.code, found.broken) == (1, check), found
    assert [name for name, state in found.states.items() if state == "FAILED"] == [check]
    assert found.remedy
    for word in words:
        assert word in found.details[check], found


def create_topics(variables: dict[str, Any]) -> None:
    names: dict[str, Any] = {name.removeprefix("KVSIGHT_").lower(): value for name, value in variables.items()}
    settings = KafkaSettings(topic_retention_s=3600, **names)
    asyncio.run(inspect_topics(KafkaConnection(settings), settings, create=True))


@pytest.fixture(scope="module")
def chain(kafka_bootstrap: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    topics = own_topics(kafka_bootstrap)
    create_topics(topics)
    folder = tmp_path_factory.mktemp("chain")
    with (
        ServiceProcess(folder, **topics) as service,
        SimulatedEngine(KVSIGHT_WORKER="engine-0", **topics) as engine,
    ):
        service.wait_until_ready()
        yield Chain(topics, service, engine, redis_url)


def test_a_whole_chain_is_ok_with_a_simulated_engine(chain: Chain) -> None:
    found = chain.examine()
    assert (found.code, found.broken, list(found.states)) == (0, None, CHECKS), found
    assert set(found.states.values()) == {"ok"}, found
    assert "4 of 4 pages" in found.details["answer"]
    assert "1337" in found.details["hash seed"]


def test_a_prompt_as_text_may_be_held_already_by_the_simulated_engine(chain: Chain) -> None:
    text = "A text that is long enough for two pages."
    first, second = (chain.examine(prompt=text, kafka=None) for _ in range(2))
    assert (first.code, second.code) == (0, 0), (first, second)
    assert first.details["events"] == "events of engine-0 arrive and store the prompt"
    assert second.details["events"] == "events of engine-0 arrive and hold the prompt already"
    assert "2 of 2 pages" in second.details["answer"]


def test_parts_that_are_not_given_are_skipped(chain: Chain) -> None:
    chain.engine.complete([1] * 16)
    found = examine({}, url=chain.service.url, wait=WAIT_S)
    assert found.code == 0, found
    skipped = {name: found.details[name] for name, state in found.states.items() if state == "skipped"}
    assert {name: why for name, why in skipped.items() if "--kafka" in why} == dict.fromkeys(CHECKS[:3], "no --kafka")
    assert set(skipped) == {*CHECKS[:3], "Redis", "engine", "block size", "hash seed", "answer"}


@pytest.mark.parametrize(
    ("flags", "variables", "check", "words", "remedy"),
    [
        ("--kafka 127.0.0.1:{port}", {}, "broker", "127.0.0.1:{port}: connection refused", "start the broker"),
        ("", {"EVENTS_TOPIC": "no-e", "CONTROL_TOPIC": "no-c"}, "topics", "no-e and no-c", "doctor --create-topics"),
        ("", {"TOPIC_PARTITIONS": "20"}, "topics", "it has 8 partitions, and KVSIGHT_TOPIC_PARTITIONS is 20", "add"),
        (
            "--snapshot-interval-s 7200",
            {},
            "retention",
            "retention.ms=3600000 is shorter than KVSIGHT_SNAPSHOT_INTERVAL_S=7200",
            "raise retention.ms",
        ),
        ("--redis redis://127.0.0.1:{port}", {}, "Redis", "127.0.0.1:{port}: connection refused", "start Redis"),
        ("--url http://127.0.0.1:{port}", {}, "service", "http://127.0.0.1:{port}", "kvsight serve"),
        ("--engine http://127.0.0.1:{port}", {}, "engine", "http://127.0.0.1:{port}", "start the engine's HTTP server"),
    ],
    ids=lambda each: str(each)[:30],
)
def test_a_part_that_is_stopped_or_set_otherwise_is_named(
    chain: Chain, flags: str, variables: dict[str, str], check: str, words: str, remedy: str
) -> None:
    port = free_port()
    named = dict(zip(*[iter(flags.format(port=port).replace("--", "").split())] * 2, strict=True))
    changed = {f"KVSIGHT_{name}": value for name, value in variables.items()}
    found = chain._replace(topics=chain.topics | changed).examine(**named)
    assert_broken(found, check, words.format(port=port))
    assert remedy in found.remedy


async def test_an_engine_that_wants_a_key_is_named(chain: Chain) -> None:
    async with scripted(Reply(401, b"no key")) as server:
        done = await asyncio.to_thread(kvsight, "doctor", "--url", chain.service.url, "--engine", server.url)
    failed, remedy = done.stdout.splitlines()[-2:]
    assert failed == f"FAILED   engine      {server.url}/v1/models: status 401: no key"
    assert remedy.endswith("correct --engine, --engine-token-file")


def test_a_worker_whose_publisher_was_closed_is_named(chain: Chain) -> None:
    with PublishingProcess("closed", **chain.topics) as publisher:
        publisher.store(1)
        wait_until(lambda: chain.service.listener("closed").get("state") == "live", 60, "the worker")
        publisher.close()
    wait_until(lambda: chain.service.listener("closed")["state"] != "live", 60, "the end of its publisher")
    found = examine({}, url=chain.service.url, worker="closed", wait=WAIT_S)
    assert_broken(found, "events", "closed is expired (closed)")
    assert "if its publisher was stopped, start it again" in found.remedy


def test_a_service_that_is_not_ready_is_named(chain: Chain, tmp_path: Path) -> None:
    with ServiceProcess(tmp_path, KVSIGHT_KAFKA=f"127.0.0.1:{free_port()}") as service:
        assert_broken(chain.examine(url=service.url), "service", "it is not ready: log unreadable")


def test_a_service_that_reads_another_topic_is_named(chain: Chain, tmp_path: Path) -> None:
    other = own_topics(chain.topics["KVSIGHT_KAFKA"])
    with ServiceProcess(tmp_path, **other) as service:
        service.wait_until_ready()
        found = chain.examine(url=service.url)
    assert_broken(found, "events", "the service does not know any worker of model m")
    assert "KVSIGHT_EVENTS_TOPIC" in found.remedy


def test_the_wrong_clock_of_a_publisher_is_named(chain: Chain) -> None:
    with PublishingProcess("ahead", clock_ahead_s=40, **chain.topics) as publisher:
        publisher.store(1)
        found = chain.examine(engine=None, worker="ahead")
    assert_broken(found, "clocks", "the clock of publisher ahead is ", " s ahead")


@pytest.mark.parametrize(
    ("fault", "check", "words"),
    [
        ({"pages_emitted": 0}, "events", "no record of worker {} of model m arrived .*, only of engine-0 of model m"),
        ({"clock_ahead_s": -60}, "clocks", "the clock of the engine is .* s behind"),
        ({"announced_block_size": 32}, "block size", "the engine has pages of 32 tokens, the index pages of 16 tokens"),
        ({"pages_emitted": 3}, "answer", "the engine reuses 4 pages of the prompt, the index has 3"),
        ({"pages_kept": 1}, "answer", "the index has 4 pages of the prompt, the engine reuses 1"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_the_fault_of_a_simulated_engine_is_named(chain: Chain, fault: dict[str, Any], check: str, words: str) -> None:
    chain.engine.complete([2] * 16)  # another worker of the same model is heard
    name = "-".join(map(str, *fault.items())).replace("_", "-")
    with SimulatedEngine(fault, KVSIGHT_WORKER=name, **chain.topics) as engine:
        found = chain.examine(engine=engine.url, worker=name)
    assert_broken(found, check)
    assert re.search(words.format(name), found.details[check]), found


@pytest.mark.parametrize(
    ("fault", "block_size", "check", "words", "remedy"),
    [
        ({}, 32, "block size", "engine-0: block size 16, registered with 32", ""),
        (
            {"connects": True},
            16,
            "events",
            "cannot connect to tcp://127.0.0.1:{}: connection refused",
            "Start the engine with KV events on, and with tcp://*:PORT as its own `endpoint`",
        ),
    ],
    ids=["block size", "connects instead of binding"],
)
def test_the_fault_of_a_registered_engine_is_named(
    tmp_path: Path, fault: dict[str, Any], block_size: int, check: str, words: str, remedy: str
) -> None:
    port = free_port()
    with ServiceProcess(tmp_path) as service, SimulatedEngine({"zmq_port": port, **fault}) as engine:
        service.wait_until_ready()
        with Client(service.url) as client:
            client.register("engine-0", f"tcp://127.0.0.1:{port}", "m", block_size)
        connects = bool(fault)
        wait_until(lambda: bool(service.listener("engine-0").get("failure")) == connects, 60, "the connection")
        found = examine({}, url=service.url, engine=engine.url, wait=1 if connects else 10)
    assert_broken(found, check, words.format(port))
    assert found.remedy.startswith(remedy)


def test_another_hash_seed_of_a_simulated_engine_is_named(chain: Chain) -> None:
    with SimulatedEngine(KVSIGHT_WORKER="engine-4", KVSIGHT_HASH_SEED=7, **chain.topics) as engine:
        found = chain.examine(engine=engine.url)
        assert_broken(found, "hash seed", "none has a hash that the service computes")
        assert "KVSIGHT_HASH_SEED" in found.remedy
        found = chain._replace(topics=chain.topics | {"KVSIGHT_HASH_SEED": "7"}).examine(engine=engine.url)
        assert_broken(found, "hash seed", "hashed with the seed 7, and the service uses another")


def test_a_simulated_engine_that_does_not_report_its_cache_is_compared_as_far_as_possible(chain: Chain) -> None:
    with SimulatedEngine({"reports_cached": False}, KVSIGHT_WORKER="engine-7", **chain.topics) as engine:
        found = chain.examine(engine=engine.url)
    assert (found.code, found.states["answer"]) == (0, "skipped"), found
    assert "the index has 4 of 4 pages" in found.details["answer"]
    assert "--enable-prompt-tokens-details" in found.details["answer"]


def test_people_read_one_line_for_each_check_and_what_to_do(chain: Chain) -> None:
    done = kvsight("doctor", "--url", f"http://127.0.0.1:{free_port()}", environment=chain.topics)
    assert done.returncode == 1
    *ok, skipped, failed, remedy = done.stdout.splitlines()
    assert [line.split()[:2] for line in ok] == [["ok", name] for name in CHECKS[:3]]
    assert skipped == "skipped  Redis       no --redis"
    assert failed.startswith("FAILED   service     http://127.0.0.1:")
    assert remedy == "         what to do: start `kvsight serve`, or correct --url and --api-token"
    assert done.stderr == ""


def test_a_prompt_shorter_than_a_page_is_one_line(chain: Chain) -> None:
    done = kvsight("doctor", "--url", chain.service.url, "--engine", chain.engine.url, "--prompt", "1 2 3")
    assert done.returncode == 2
    assert done.stderr == "kvsight: --prompt has 3 tokens; give more than 16, one page\n"


@pytest.mark.parametrize("status", [200, 500])
async def test_an_answer_of_an_engine_without_end_is_refused(status: int) -> None:
    async with scripted(Reply(body=b'{"data":[{"id":"m"}]}'), Reply(status, b" " * (17 * 2**20))) as server:
        with closing(EngineClient(server.url)) as engine:
            assert await asyncio.to_thread(engine.model) == "m"
            with pytest.raises(EngineError) as error:
                await asyncio.to_thread(engine.model)
    assert str(error.value) == f"{server.url}/v1/models: the answer is larger than 16777216 bytes"
