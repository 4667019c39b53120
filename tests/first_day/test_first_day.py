"""The whole path of a first day, step by step. Each step asserts what people see: stdout, the log and GET /workers."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.first_day.site import NOBODY, Api, Running, Site
from tests.support.engines.event_payloads import payload, stored
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.servers.kafka_broker import KafkaBroker
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.secure_kafka import PASSWORD, USER, SecureKafka
from tests.support.waiting import wait_until

MODEL = "demo-model"
TTL_S = 10.0  # the default time-to-live
REDIS_PASSWORD = "a-secret-of-redis"

pytestmark = [
    pytest.mark.timing("each step of a first day must end within its time"),
    pytest.mark.soak,
    pytest.mark.timeout(600),
]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users may read. Those of pytest are private."""
    with tempfile.TemporaryDirectory(prefix="kvsight-first-day-", ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def broker(folder: Path) -> Iterator[KafkaBroker]:
    own = folder / "kafka"
    own.mkdir()
    broker = SecureKafka.create(own)
    broker.restart()
    yield broker
    broker.kill()


@pytest.fixture
def redis(folder: Path) -> Iterator[RedisServer]:
    own = folder / "redis"
    own.mkdir()
    (folder / "redis-password").write_text(REDIS_PASSWORD + "\n")
    server = RedisServer(own, password=REDIS_PASSWORD)
    server.restart()
    yield server
    server.kill()


@pytest.fixture
def site(folder: Path, broker: KafkaBroker) -> Iterator[Site]:
    kafka = SecureKafka(folder / "kafka")
    password = folder / "kafka-password"
    password.write_text(PASSWORD + "\n")
    environment = {
        "KVSIGHT_KAFKA": kafka.address("LOGIN"),
        "KVSIGHT_KAFKA_TLS": "true",
        "KVSIGHT_KAFKA_CA_FILE": str(kafka.certificates.ca),
        "KVSIGHT_KAFKA_SASL_MECHANISM": "SCRAM-SHA-512",
        "KVSIGHT_KAFKA_USERNAME": USER,
        "KVSIGHT_KAFKA_PASSWORD_FILE": str(password),
    }
    site = Site(folder, environment)
    yield site
    site.close()


@pytest.fixture
def api() -> Iterator[Api]:
    api = Api()
    yield api
    api.close()


def test_the_first_day(site: Site, broker: KafkaBroker, redis: RedisServer, api: Api, folder: Path) -> None:
    topics_are_created_and_checked(site)
    serve = service_starts_without_a_home_of_its_own(site, redis, api, folder)
    engines = [simulated_engine_publishes(site, number) for number in range(2)]
    with ZmqEngine() as vllm:
        bridge_reads_an_engine(site, vllm, api)
        prompt = json.loads(site.run("demo-prompt", "--model", MODEL))
        queries_tell_the_workers_apart(site, api, prompt)
        events_are_recorded_and_replayed(site, folder, prompt)
        broker_goes_away_and_comes_back(serve, broker, api)
        engine_dies_and_comes_back(site, engines[0], serve, api)
        engine_says_goodbye(engines[1], serve, api)
    assert PASSWORD not in serve.output


def topics_are_created_and_checked(site: Site) -> None:
    missing = site.run("topics", "check", rc=1)
    assert "missing: kv-events" in missing
    created = site.run("topics", "create", "--topic-partitions", 4)
    assert re.search(r"created: kv-events\b.*\b4 partitions", created)
    assert "kv-events" in site.run("topics", "check", "--topic-partitions", 4)


def service_starts_without_a_home_of_its_own(site: Site, redis: RedisServer, api: Api, folder: Path) -> Running:
    home = folder / "home"
    home.mkdir(mode=0o555)
    user = NOBODY if os.geteuid() == 0 else None
    serve = site.start(
        "serve",
        "serve",
        "--port",
        api.port,
        "--log-format",
        "json",
        "--redis-password-file",
        folder / "redis-password",
        user=user,
        HOME=home,
        XDG_CACHE_HOME=home,
        KVSIGHT_REDIS=redis.url,
    )
    wait_until(lambda: api.is_up() or not serve.running, 200, "the service to listen")
    assert serve.running, serve.output
    assert "compiling kernels" in serve.output  # before they are compiled, with the reason why they are not kept
    assert "Traceback" not in serve.output
    wait_until(lambda: api.ready()[0] == 200, 60, "the service to be ready")
    assert not any(home.iterdir())
    return serve


def simulated_engine_publishes(site: Site, number: int) -> Running:
    return site.start(
        f"engine-{number}", "engine", "--worker", f"engine-{number}", "--model", MODEL, "--seed", number, "--rate", 20
    )


def bridge_reads_an_engine(site: Site, vllm: ZmqEngine, api: Api) -> None:
    engine = f"worker=vllm-0,model={MODEL},endpoint={vllm.endpoint},replay_endpoint={vllm.replay_endpoint}"
    site.start("bridge", "bridge", "--engine", engine)
    vllm.wait_for_readers()
    vllm.send(payload(stored([1, 2], range(128), block_size=64)))
    live = {"engine-0": "live", "engine-1": "live", "vllm-0": "live"}
    wait_until(lambda: api.states() == live, 60, f"three live workers; they are {api.states()}")
    shown = site.run("workers", "--url", api.url)
    assert all(re.search(rf"{worker}\b.*\blive\b", shown) for worker in live)
    assert max(map(len, shown.splitlines())) <= 80


def queries_tell_the_workers_apart(site: Site, api: Api, prompt: dict[str, object]) -> None:
    def tokens() -> dict[str, int]:
        return api.query(prompt)

    wait_until(lambda: len(set(tokens().values())) == 2, 30, "two engines that hold different parts of the prompt")
    tokens_file = site.folder / "prompt.json"
    tokens_file.write_text(str(prompt["token_ids"]))
    shown = site.run("query", "--url", api.url, "--model", MODEL, "--tokens", f"@{tokens_file}")
    for worker, held in tokens().items():
        assert re.search(rf"{worker}\b.*\b{held:,}\b|{worker}\b.*\b{held}\b", shown)
    assert "vllm-0" in shown  # why it is absent


def events_are_recorded_and_replayed(site: Site, folder: Path, prompt: dict[str, object]) -> None:
    log, prompt_file = folder / "log", folder / "query.json"
    record = site.start("record", "record", log)
    wait_until(lambda: sum(each.stat().st_size for each in log.glob("*")) > 100_000, 60, "recorded events")
    record.terminate()
    prompt_file.write_text(json.dumps(prompt))
    shown = site.run("replay", log, "--query", prompt_file)
    assert "engine-0" in shown
    assert "engine-1" in shown
    late = site.run("replay", log, "--query", prompt_file, "--at", "2099-01-01T00:00:00", rc=2)
    assert "engine-0" in late


def broker_goes_away_and_comes_back(serve: Running, broker: KafkaBroker, api: Api) -> None:
    lines = serve.count("")
    broker.kill()
    wait_until(lambda: api.ready()[0] == 503, 60, "the outage to be told")
    assert "log unreadable since" in api.ready()[1]
    assert api.metric("kvsight_log_up") == 0
    wait_until(lambda: "live" not in api.states().values(), 60, "no view to be called live")
    broker.restart()
    wait_until(lambda: api.ready()[0] == 200, 60, "the log to be read again")
    wait_until(lambda: set(api.states().values()) == {"live"}, 60, "all views to be live again")
    assert serve.count("log readable again") == 1
    assert serve.count("") - lines < 40


def engine_dies_and_comes_back(site: Site, engine: Running, serve: Running, api: Api) -> None:
    engine.kill()
    wait_until(lambda: api.states().get("engine-0") == "expired", 3 * TTL_S, "the silent worker to expire")
    serve.wait_for("engine-0", "expired")
    simulated_engine_publishes(site, 0)
    wait_until(lambda: api.states().get("engine-0") == "live", 60, "the restarted worker to be live")
    serve.wait_for("engine-0", "came back")


def engine_says_goodbye(engine: Running, serve: Running, api: Api) -> None:
    assert "engine-1" in api.states()
    engine.terminate()
    wait_until(lambda: api.states().get("engine-1") != "live", TTL_S / 2, "the worker to leave before its time-to-live")
    serve.wait_for("engine-1", "left")
