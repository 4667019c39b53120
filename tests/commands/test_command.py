"""The command as a real process: its streams and its exit code."""

import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import simulation
from kv_events.schema import CLOSED
from kvsight import Client, StateChanged
from tests.models.stream_reader import StreamReader
from tests.rigs.bridge import GPU, on
from tests.support.commands import RunningCommand, invoke, kvsight
from tests.support.engines.event_payloads import names_of, payload, stored
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.http_checks import WITHOUT_TLS
from tests.support.log.records import records_of
from tests.support.servers.child_process import free_port
from tests.support.servers.service_process import own_topics
from tests.support.waiting import wait_until


def assert_one_clear_line(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    for word in words:
        assert word in done.stderr


def test_a_bad_option_is_refused_before_kernels_are_compiled(tmp_path: Path) -> None:
    done = kvsight("serve", environment={"KVSIGHT_PORT": "abc", "NUMBA_CACHE_DIR": str(tmp_path)})
    assert_one_clear_line(done, "kvsight: KVSIGHT_PORT: got 'abc', expected a valid integer")
    assert not [*tmp_path.iterdir()]


def test_a_port_in_use_is_one_clear_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for command in ("serve", "demo", "route"):
            assert_one_clear_line(
                kvsight(command, "--port", port), "kvsight: cannot listen on ", f"port {port}: the port is in use"
            )


def test_a_server_that_no_engine_can_reach_reports_it() -> None:
    port = free_port()
    with RunningCommand("serve", "--port", port) as command:
        command.wait_for("kvsight register")
        socket.create_connection(("127.0.0.1", port)).close()  # the line comes after the server listens
        command.end(signal.SIGTERM)
    assert f"http://127.0.0.1:{port}" in command.err
    assert "--kafka" in command.err


def test_the_demo_ends_by_itself_and_shows_policies_and_an_answer() -> None:
    port = free_port()
    heedless = {"KVSIGHT_API_TOKEN": "secret", "KVSIGHT_TENANT": "t", "KVSIGHT_MAX_STREAMS": "1"}
    done = kvsight("demo", "--exit", "--port", port, "--requests", 320, environment=heedless)
    assert done.returncode == 0, done.stderr
    for word in ("overlap-load", "round-robin", "random", "/query", "worker-", "live", f"127.0.0.1:{port}"):
        assert word in done.stdout + done.stderr
    addresses = [word for word in done.stdout.split() if word.startswith("http://")]
    assert addresses[0] == f"http://127.0.0.1:{port}"  # the page


def test_the_demo_of_a_tiered_fleet_shows_gpu_below_cpu_below_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "POLICIES", ["overlap-load"])  # the comparison of all takes seconds
    done = invoke("demo", "--exit", "--port", free_port(), "--requests", 360, "--cache", "hiradix")
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("worker-") and "live" in line]
    assert any(0 < int(gpu) < int(cpu) < int(disk) for _, _, gpu, cpu, disk, *_ in rows), done.stdout


def test_the_demo_ends_cleanly_on_ctrl_c_and_its_engines_send_closing_records() -> None:
    port = free_port()
    with (
        RunningCommand("demo", "--port", port, "--requests", 320) as command,
        Client(f"http://127.0.0.1:{port}") as client,
    ):
        command.wait_for("Ctrl-C")
        events = client.events()
        next(events)
        command.send(signal.SIGINT)
        states = {event.instance_id: (event.state, event.reason) for event in events if isinstance(event, StateChanged)}
        assert command.end() == 0, command.err
    assert states == {f"worker-{number}": ("expired", CLOSED) for number in range(4)}
    assert "Traceback" not in command.err


def test_a_named_topic_is_recorded_and_the_recording_continues(kafka_bootstrap: str, tmp_path: Path) -> None:
    def views() -> dict[str, dict[str, Any]]:
        simulate = ("simulate", "--requests", 40, "--workers", 2, "--policy", "random", "--kafka", kafka_bootstrap)
        for words in (simulate, ("record", tmp_path / "log", "--kafka", kafka_bootstrap, "--once")):
            assert kvsight(*words, environment=topics).returncode == 0
        return {view["worker"]: view for view in json.loads(kvsight("replay", tmp_path / "log", "--json").stdout)}

    topics = own_topics(kafka_bootstrap)
    first, second = views(), views()
    assert {view["state"] for view in [*first.values(), *second.values()]} <= {"live", "expired"}
    assert {view["model"] for view in second.values()} == {"simulation-random"}
    assert len(first) == 2
    assert all(second[worker]["epoch"] > first[worker]["epoch"] for worker in first)


# --- bridge ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def engine() -> Iterator[ZmqEngine]:
    with ZmqEngine() as running:
        yield running


def held(folder: Path) -> set[tuple[int, int]]:
    """Return the pages that the only stream of an event log holds at its end."""
    view = StreamReader()
    for record in records_of(folder):
        view.read(record.payload)
    return view.pages


def scraped(port: int) -> str:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/metrics", verify=WITHOUT_TLS).text
    except httpx.HTTPError:
        return ""


def test_engines_listed_in_a_file_are_bridged_into_a_log_until_it_is_stopped(tmp_path: Path, engine: ZmqEngine) -> None:
    config, log, port = tmp_path / "engines.toml", tmp_path / "log", free_port()
    config.write_text(
        f'[[engines]]\nworker = "w"\nmodel = "m"\nendpoint = "{engine.endpoint}"\n'
        f'replay_endpoint = "{engine.replay_endpoint}"\n'
    )
    engine.send(payload(stored([1, 2], range(8))))
    words = ("bridge", "--config", config, "--event-log-dir", log, "--metrics-port", port)
    with RunningCommand(*words) as command:
        engine.wait_for_readers(deadline_s=60)
        engine.send(payload(stored([3], range(8, 12), parent=2), ["BlockStored", ["x"]]))
        wait_until(
            lambda: 'kvsight_bridge_pages{dp_rank="0",model="m",tenant="default",worker="w"} 3.0' in scraped(port)
        )
        assert 'reason="type"' in scraped(port)
        assert command.end(signal.SIGTERM) == 0
    assert "stopped after 3 events in 2 batches" in command.err
    assert held(log) == on(GPU, names_of(range(12)))
