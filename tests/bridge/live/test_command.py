"""`kvsight bridge` as a real process."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kv_events.log.event_log import EventLogReader
from tests.models.stream_reader import StreamReader
from tests.rigs.bridge import GPU, on
from tests.support.commands import ENVIRONMENT, KVSIGHT, kvsight
from tests.support.engines.event_payloads import names_of, payload, stored
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.servers.child_process import free_port
from tests.support.waiting import wait_until


@pytest.fixture
def engine() -> Iterator[ZmqEngine]:
    with ZmqEngine() as running:
        yield running


def held(folder: Path) -> set[tuple[int, int]]:
    """Return the pages that the only stream of an event log holds at its end."""
    view = StreamReader()
    reader = EventLogReader(folder)
    for _, record in reader.read(reader.first_index):
        view.read(record.payload)
    return view.pages


def scraped(port: int) -> str:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/metrics").text
    except httpx.HTTPError:
        return ""


def test_engines_listed_in_a_file_are_bridged_into_a_log_until_it_is_stopped(tmp_path: Path, engine: ZmqEngine) -> None:
    config, log, port = tmp_path / "engines.toml", tmp_path / "log", free_port()
    config.write_text(
        f'[[engines]]\nworker = "w"\nmodel = "m"\nendpoint = "{engine.endpoint}"\n'
        f'replay_endpoint = "{engine.replay_endpoint}"\n'
    )
    engine.send(payload(stored([1, 2], range(8))))
    command = [*KVSIGHT, "bridge", "--config", str(config), "--event-log-dir", str(log), "--metrics-port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        engine.wait_for_readers(deadline_s=60)
        engine.send(payload(stored([3], range(8, 12), parent=2), ["BlockStored", ["x"]]))
        wait_until(
            lambda: 'kvsight_bridge_pages{dp_rank="0",model="m",tenant="default",worker="w"} 3.0' in scraped(port)
        )
        assert 'reason="type"' in scraped(port)
        process.send_signal(signal.SIGTERM)
        _, words = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "stopped after 3 events in 2 batches" in words
    assert held(log) == on(GPU, names_of(range(12)))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "no engine to read"),
        (["--engine", "worker=w,model=m"], "endpoint"),
        (["--engine", "worker=w,model=m,endpoint=nowhere"], "endpoint: got 'nowhere'"),
        (["--engine", "worker=w,model=m,endpoint=tcp://h:1"], "exactly one of them"),
    ],
)
def test_a_mistake_is_one_clear_line(arguments: list[str], complaint: str) -> None:
    ended = kvsight("bridge", *arguments)
    assert ended.returncode == 2
    assert complaint in ended.stderr
    assert "Traceback" not in ended.stderr
