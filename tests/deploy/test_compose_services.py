"""The services of docker-compose.yml as processes of this machine, and the documented commands against them."""

import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import compose
from tests.support.commands import RunningCommand
from tests.support.http_checks import WITHOUT_TLS
from tests.support.servers.child_process import free_port
from tests.support.servers.redis_server import RedisServer
from tests.support.waiting import wait_until

SERVICES = ("indexer", "engine-0", "engine-1")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Topics of this test's own; `kvsight`, and a `docker` that runs what is meant for a container, are on the path."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, script in {
        "kvsight": f'exec {sys.executable} -m kvsight "$@"',
        "docker": '[ "$1 $2 $3" = "compose exec -T" ] || exit 3; shift 4; exec "$@"',
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    run = uuid.uuid4().hex
    return {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(compose.ROOT),
        "KVSIGHT_EVENTS_TOPIC": f"events-{run}",
        "KVSIGHT_CONTROL_TOPIC": f"control-{run}",
    }


@pytest.fixture
def url(kafka_bootstrap: str, redis_server: RedisServer, environment: dict[str, str], tmp_path: Path) -> Iterator[str]:
    """The address of the running stack."""
    port = free_port()
    addresses = {
        "kafka:9092": kafka_bootstrap,
        "redis://redis:6379/0": redis_server.url,
        "0.0.0.0": "127.0.0.1",
        "8000": str(port),
    }
    with ExitStack() as running:
        for name in SERVICES:
            own = addresses | {"9100": str(free_port())}  # of metrics: each container has its own address
            words = [own.get(word, word) for word in compose.command(name)]
            variables = {**environment, **compose.environment(name)}
            service = running.enter_context(RunningCommand(*words[1:], **variables))
            if name == "indexer":
                service.wait_for("kvsight listens on", 100)
        yield f"http://localhost:{port}"


def states(url: str) -> dict[str, str]:
    return {each["instance_id"]: each["state"] for each in httpx.get(f"{url}/workers", verify=WITHOUT_TLS).json()}


def run(line: str, environment: dict[str, str], folder: Path) -> str:
    done = subprocess.run(
        ["/bin/bash", "-euo", "pipefail", "-c", line],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=folder,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, f"{line}\n{done.stderr}"
    return done.stdout


def shown_answer() -> Any:
    page = (compose.ROOT / "docs" / "deployment.md").read_text()
    return json.loads(re.findall(r"```json\n(.*?)```", page, re.DOTALL)[0])


@pytest.mark.timeout(300)
def test_the_documented_query_hits_the_engines_of_the_stack_differently(
    url: str, environment: dict[str, str], tmp_path: Path
) -> None:
    wait_until(lambda: states(url) == {"engine-0": "live", "engine-1": "live"}, 150, "two live engines")
    lines = [line for line in compose.documented("Docker Compose") if "compose up" not in line]
    assert len(lines) == 4
    here = {**environment, "KVSIGHT_URL": url}
    printed = [run(line.replace("http://localhost:8000", url), here, tmp_path) for line in lines]
    answer, shown = json.loads(printed[1]), shown_answer()
    assert answer["scores"] == shown["scores"] == {"engine-0": {"0": 2048}, "engine-1": {"0": 1024}}
    assert answer["instances"].keys() == shown["instances"].keys()
    assert "2048" in printed[2]
    assert "1024" in printed[2]
    assert len({worker["listeners"]["0"]["digest"] for worker in json.loads(printed[3])}) == 2
