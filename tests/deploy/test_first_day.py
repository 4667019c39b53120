"""The first day with kvsight, from an empty broker to a broker that comes back, on one machine without containers.

Each step asserts what people see: stdout, the log and `GET /workers`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from tests.support.commands import KVSIGHT
from tests.support.compose import ROOT
from tests.support.engines.event_payloads import payload, stored
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.servers.child_process import ChildProcess, free_port
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


NOBODY = 65534
"""A user without a name, a home folder or write access, as in containers on OpenShift."""


class Site:
    """The environment of all processes, and the folder for their output."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self._environment = {"PYTHONPATH": str(ROOT), "COLUMNS": "80", **environment}
        self._processes: list[ChildProcess] = []

    def run(self, *words: object, rc: int = 0) -> str:
        """Run a `kvsight` command to its end and return stdout. rc: the expected exit status."""
        done = subprocess.run(
            [*KVSIGHT, *map(str, words)],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=self.folder,
            env={**os.environ, **self._environment},
        )
        assert done.returncode == rc, f"kvsight {' '.join(map(str, words))}\n{done.stdout}{done.stderr}"
        return done.stdout

    def start(self, name: str, *words: object, user: int | None = None, **variables: object) -> Running:
        """Start a `kvsight` service. user: number of the user and group that it runs as."""
        command = [*KVSIGHT, *map(str, words)]
        if user is not None:
            command = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *command]
        environment = self._environment | {name: str(value) for name, value in variables.items()}
        running = Running(command, self.folder / f"{name}.log", environment)
        self._processes.append(running)
        return running

    def close(self) -> None:
        """Kill whatever still runs."""
        for process in self._processes:
            process.kill()


class Running(ChildProcess):
    """A service of the site."""

    def terminate(self) -> None:
        """Send SIGTERM to the service alone and wait for its end."""
        self.send(signal.SIGTERM)
        wait_until(lambda: not self.running, deadline_s=30, what="the service to end")

    @property
    def output(self) -> str:
        """All that the service has written to stdout and stderr."""
        return self._log.read_text(errors="replace")

    def lines(self, *words: str) -> list[str]:
        """Return the lines that contain all the words."""
        return [line for line in self.output.splitlines() if all(word in line for word in words)]

    def wait_for(self, *words: str) -> None:
        """Return as soon as a line contains all the words."""
        wait_until(lambda: self.lines(*words), 60, f"a line with {words} in:\n{self.output}")


class Api:
    """The service, as a router and an operator see it."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=30)

    def ready(self) -> tuple[int, str]:
        """Return the status and the text of GET /ready."""
        answer = self.http.get("/ready")
        return answer.status_code, answer.text

    def is_up(self) -> bool:
        """Return whether the service listens."""
        try:
            return self.http.get("/health").is_success
        except httpx.TransportError:
            return False

    def states(self) -> dict[str, str]:
        """Return worker -> state, from GET /workers."""
        return {each["instance_id"]: each["state"] for each in self.http.get("/workers").json()}

    def query(self, body: object) -> dict[str, int]:
        """Return worker -> tokens that it holds."""
        answer = self.http.post("/query", json=body)
        assert answer.is_success, answer.text
        return {worker: held["longest_matched"] for worker, held in answer.json()["instances"].items()}

    def metric(self, name: str) -> float:
        """Return the value of a metric without labels."""
        lines = self.http.get("/metrics").text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


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
    with api.http:
        yield api


def test_the_first_day(site: Site, broker: KafkaBroker, redis: RedisServer, api: Api, folder: Path) -> None:
    topics_are_created_and_checked(site)
    serve = service_starts_without_a_home_of_its_own(site, redis, api, folder)
    engines = [simulated_engine_publishes(site, number) for number in range(2)]
    with ZmqEngine() as vllm:
        bridge_reads_an_engine(site, vllm, api)
        prompt = json.loads(site.run("demo", "--prompt", "--model", MODEL))
        queries_tell_the_workers_apart(site, api, prompt)
        events_are_recorded_and_replayed(site, folder, prompt)
        broker_goes_away_and_comes_back(serve, broker, api)
        engine_dies_and_comes_back(site, engines[0], serve, api)
        engine_sends_a_closing_record(engines[1], serve, api)
    assert PASSWORD not in serve.output


def topics_are_created_and_checked(site: Site) -> None:
    assert "kv-events and kv-control: no such topic" in site.run("doctor", rc=1)
    created = site.run("doctor", "--create-topics", "--topic-partitions", 4)
    assert re.search(r"created: kv-events\b.*\b4 partitions", created)
    assert "kv-events with 4 partitions" in site.run("doctor", "--topic-partitions", 4, rc=1)  # no service yet


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
    wait_until(lambda: api.is_up() or not serve.running, 60, "the service to listen")
    assert serve.running, serve.output
    wait_until(lambda: "compiling kernels" in serve.output, 60, "the reason why they are not kept")
    assert "Traceback" not in serve.output
    wait_until(lambda: api.ready()[0] == 200, 200, "the service to be ready")
    assert not any(home.iterdir())
    return serve


def simulated_engine_publishes(site: Site, number: int) -> Running:
    return site.start(
        f"engine-{number}", "demo", "--engine", f"engine-{number}", "--model", MODEL, "--seed", number, "--rate", 20
    )


def bridge_reads_an_engine(site: Site, vllm: ZmqEngine, api: Api) -> None:
    engine = f"worker=vllm-0,model={MODEL},endpoint={vllm.endpoint},replay_endpoint={vllm.replay_endpoint}"
    site.start("bridge", "bridge", "--engine", engine)
    vllm.wait_for_readers()
    vllm.send(payload(stored([1, 2], range(128), block_size=64)))
    live = {"engine-0": "live", "engine-1": "live", "vllm-0": "live"}
    wait_until(lambda: api.states() == live, 60, f"three live workers; they are {api.states()}")
    shown = site.run("top", "--ranks", "--once", "--url", api.url)
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
    lines = len(serve.lines())
    broker.kill()
    wait_until(lambda: api.ready()[0] == 503, 60, "the outage to be told")
    assert "log unreadable since" in api.ready()[1]
    assert api.metric("kvsight_log_up") == 0
    wait_until(lambda: "live" not in api.states().values(), 60, "no view to be called live")
    broker.restart()
    wait_until(lambda: api.ready()[0] == 200, 60, "the log to be read again")
    wait_until(lambda: set(api.states().values()) == {"live"}, 60, "all views to be live again")
    assert len(serve.lines("log readable again")) == 1
    assert len(serve.lines()) - lines < 40


def engine_dies_and_comes_back(site: Site, engine: Running, serve: Running, api: Api) -> None:
    engine.kill()
    wait_until(lambda: api.states().get("engine-0") == "expired", 3 * TTL_S, "the silent worker to expire")
    serve.wait_for("engine-0", "expired")
    simulated_engine_publishes(site, 0)
    wait_until(lambda: api.states().get("engine-0") == "live", 60, "the restarted worker to be live")
    serve.wait_for("engine-0", "came back")


def engine_sends_a_closing_record(engine: Running, serve: Running, api: Api) -> None:
    assert "engine-1" in api.states()
    engine.terminate()
    wait_until(lambda: api.states().get("engine-1") != "live", TTL_S / 2, "the worker to leave before its time-to-live")
    serve.wait_for("engine-1", "left")
