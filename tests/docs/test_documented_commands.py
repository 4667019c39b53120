"""Every command line of the documentation runs against real servers, or is named here with the reason why not."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kv_events.log.event_log import EventLogReader
from kv_events.schema import BlockStored, StorageMedium
from publisher import EventPublisher, PublisherSettings
from publisher.sinks import create_sink
from tests.support.commands import ENVIRONMENT, RunningCommand, kvsight
from tests.support.engines.simulated_engine import SimulatedEngine
from tests.support.pages import blocks, commands
from tests.support.servers.child_process import ChildProcess
from tests.support.servers.service_process import ServiceProcess, own_topics
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timing("documented commands must come up within their time")

NOT_HERE = {
    "docker": "needs Docker; tests/deploy checks the files, and test_compose_services.py runs the services",
    "COMPOSE_PROFILES=group,record": "needs Docker; CI runs it",
    "kvsight serve --kafka localhost:9092 --port 8000 --reuse-port": "see test_api_server.py",
    "kvsight serve --kafka localhost:9092 --tenant-limits-file /etc/kvsight/tenants.toml": "see test_tenant_limits.py",
    "make chaos": "takes ten minutes; a short run is in tests/chaos",
    "kvsight serve --kafka localhost:9092 --allowed-hosts kvsight.example,localhost,127.0.0.1": "see test_browsers.py",
    "VLLM_MODEL=Qwen/Qwen3-0.6B": "needs Docker and a GPU",
    "KVSIGHT_URL=http://kvsight:8000": "runs in test_litellm.py and test_ray.py",
    "helm": "needs a cluster; tests/deploy/test_kubernetes.py renders the chart",
    "kubectl": "needs a cluster",
    "envoy": "tests/routers run it with this configuration",
    "smg": "tests/routers/test_smg_gateway.py runs it with these flags",
    "vllm-router": "tests/routers/test_vllm_router.py runs it with these flags",
    "vllm": "needs a GPU; test_engine_plugins.py loads what the engine loads",
    "KVSIGHT_REPLACE_ZMQ=true": "the same",
    "python": "the same, for SGLang",
    "KVSIGHT_KAFKA=localhost:9092": "the same, for SGLang",
    "mooncake_master": "needs a master that is built with KV events",
    "cmake": "builds such a master",
    "apt-get": "installs system packages",
    "pip": "installs this project",
    "ENGINES=engine-0=http://10.0.0.1:8000,engine-1=http://10.0.0.2:8000": "runs in test_example_router.py",
    "export": "settings of tests/whole/test_kafka_security.py, with the `kvsight serve` that follows",
    "kvsight serve": "the same",
    "kvsight serve --redis rediss://kvsight@redis.example:6380/0": "runs in test_redis_security.py",
    "kvsight serve --kafka localhost:9092 --api-tokens-file /etc/kvsight/tokens.toml": "see test_secrets.py",
    "kvsight serve --kafka localhost:9092 --tls-cert-file cert.pem --tls-key-file key.pem": "runs in test_api_tls.py",
    "SSL_CERT_FILE=ca.pem": "the same",
    "kvsight replay recording --serve": "runs in test_replay_server.py",
    "kvsight query --show-hashes": "runs in tests/docs/test_code_blocks.py",
    "kvsight query --model my-model --text": "needs an engine's tokenizer; runs in test_terminal.py",
}
"""Beginning of a command line -> why it does not run here."""
RUNS_ON = {
    "kvsight serve": "listens on",
    "kvsight tail": "engine-0",
    "kvsight record": "recording",
    "kvsight demo --engine": "engine-2",
    "kvsight bridge": "reading",
    "kvsight republish": "reading",
    "kvsight endpoint-picker": "picks endpoints",
    "kvsight route": "routes on",
    "curl -sN": "kvsight",
}
"""Beginning of a command line that does not end by itself -> what it prints."""
TOKENS = list(range(1, 33))


class Site(NamedTuple):
    """Real servers, and an engine `engine-0` of the model `my-model`."""

    service: ServiceProcess
    embedded: ServiceProcess
    publisher: EventPublisher
    variables: dict[str, Any]
    addresses: dict[str, str]
    folder: Path

    def line(self, page: str, words: list[str]) -> str:
        """A command line for these servers."""
        line = " ".join(word if word in "|<>" else shlex.quote(word) for word in words)
        served = self.embedded if page == "docs/http.md" else self.service
        for shown, real in {**self.addresses, "localhost:8000": served.url.removeprefix("http://")}.items():
            line = line.replace(shown, real)
        return line

    def run(self, line: str) -> None:
        """Run a command that ends by itself."""
        program, *words = shlex.split(line)
        if program == "kvsight" and "|" not in words:
            done = kvsight(*words, environment=self.variables)
        else:
            shell = ["/bin/bash", "-euo", "pipefail", "-c", line]
            done = subprocess.run(shell, capture_output=True, text=True, timeout=100, env=ENVIRONMENT | self.variables)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        if line.startswith("curl") and done.stdout:
            json.loads(done.stdout)

    def run_on(self, line: str, shown: str) -> None:
        """Run a command until it has printed something, then interrupt it."""
        program, *words = shlex.split(line)
        if program == "kvsight":
            with RunningCommand(*words, **self.variables) as command:
                self.wait_for(lambda: command.has_written(shown), line)
                assert command.running, command.err
                command.end(signal.SIGINT)
                assert "Traceback" not in command.out + command.err
        else:
            output = self.folder / "output"
            output.unlink(missing_ok=True)
            with ChildProcess([program, *words], output) as process:
                self.wait_for(lambda: shown in output.read_text(), line)
                assert process.running, output.read_text()
                process.send(signal.SIGTERM)
                wait_until(lambda: not process.running, deadline_s=60, what=f"the end of {line}")

    def wait_for(self, has_printed: Callable[[], bool], line: str) -> None:
        """Let the engine store pages until a command has printed what it should."""

        def is_done() -> bool:
            self.store(time.monotonic_ns())
            return has_printed()

        wait_until(is_done, deadline_s=100, what=f"what {line} prints")

    def store(self, number: int) -> None:
        """Let the engine store another page, on two media."""
        for medium in (StorageMedium.GPU, StorageMedium.DISK):
            self.publisher.publish([BlockStored([number], None, [number % 1000] * 16, 16, medium=medium)])


@pytest.fixture
def site(kafka_bootstrap: str, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    topics = own_topics(kafka_bootstrap)
    monkeypatch.chdir(tmp_path)
    for name in ("recording", "events"):
        (tmp_path / name).mkdir()
    (tmp_path / "prompt.json").write_text(json.dumps({"model_name": "my-model", "token_ids": TOKENS}))
    (tmp_path / "tokens.txt").write_text(" ".join(map(str, TOKENS)))
    (tmp_path / "engines.toml").write_text(next(blocks("toml")).text)
    own: dict[str, Any] = {"kafka": kafka_bootstrap, "events_topic": topics["KVSIGHT_EVENTS_TOPIC"]}
    own["control_topic"] = topics["KVSIGHT_CONTROL_TOPIC"]
    settings = PublisherSettings(model="my-model", worker="engine-0", block_size=16, heartbeat_s=0.5, **own)
    with (
        EventPublisher(settings, create_sink(settings)) as publisher,
        ServiceProcess(tmp_path, **topics) as service,
        ServiceProcess(tmp_path) as embedded,
        SimulatedEngine({"model": "my-model"}, **topics, KVSIGHT_MODEL="my-model", KVSIGHT_WORKER="engine-1") as engine,
    ):
        publisher.publish([BlockStored([1, 2], None, TOKENS, 16, medium=StorageMedium.GPU)])
        service.wait_until_ready()
        wait_until(lambda: service.listener("engine-0").get("state") == "live", deadline_s=30, what="the engine")
        wait_until(lambda: service.metric("kvsight_batches_applied_total") >= 3, what="a log with a past")
        del topics["KVSIGHT_KAFKA"]
        variables = {**topics, "KVSIGHT_URL": service.url, "KVSIGHT_PORT": "0"}
        variables["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        addresses = {"localhost:9092": kafka_bootstrap, "localhost:9094": kafka_bootstrap}
        addresses["redis://localhost:6379/0"] = redis_url
        addresses["localhost:8001"] = engine.url.removeprefix("http://")
        yield Site(service, embedded, publisher, variables, addresses, tmp_path)


def reason_against(words: list[str]) -> str | None:
    """Why a command line does not run here."""
    line = " ".join(words)
    known = [
        begin for begin in NOT_HERE if line == begin or (line.startswith(f"{begin} ") and begin != "kvsight serve")
    ]
    return NOT_HERE[known[0]] if known else None


def test_every_documented_command_that_does_not_run_here_is_named() -> None:
    lines = [" ".join(words) for _, words in commands()]
    unused = {begin for begin in NOT_HERE if not any(line.startswith(begin) for line in lines)}
    assert not unused
    for line in lines:
        is_ours = line.startswith(("kvsight ", "curl ", "echo "))
        assert is_ours or reason_against(line.split(" ")), f"{line}: runs nowhere, and nothing says why"


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_every_other_command_runs(site: Site) -> None:
    site.run(site.line("", ["kvsight", "record", "recording", "--kafka", "localhost:9092", "--once"]))
    (_, first), *_, (_, last) = EventLogReader(site.folder / "recording").read(0)
    site.addresses["2026-01-31T11:50:00Z"] = datetime.fromtimestamp(first.timestamp_ms / 1000, UTC).isoformat()
    site.addresses["2026-01-31T12:00:00Z"] = datetime.fromtimestamp(last.timestamp_ms / 1000, UTC).isoformat()
    site.addresses["2026-01-31T12:10:00Z"] = datetime.fromtimestamp(last.timestamp_ms / 1000 + 1, UTC).isoformat()
    num_run = 0
    for page, words in commands():
        if reason_against(words) is None:
            line = site.line(page, words)
            ends = re.match(r"kvsight (record .*--to |tail --log .*--(full|from) )", line) is not None
            shown = None if ends else next((text for begin, text in RUNS_ON.items() if line.startswith(begin)), None)
            site.run(line) if shown is None else site.run_on(line, shown)
            num_run += 1
    assert num_run > 30
