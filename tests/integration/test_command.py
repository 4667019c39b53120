"""The command as a real process: its streams and its exit code."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kv_events.hashing import sequence_hashes, token_array
from kv_events.log.event_log import EventLogWriter
from kv_events.schema import CLOSED
from kvsight import Client, StateChanged
from tests.support.commands import ENVIRONMENT, KVSIGHT, kvsight, served_log
from tests.support.log.records import Stream, stored
from tests.support.servers.service_process import own_topics

TOKENS = list(range(1, 33))


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """An event log in which two workers store a prompt's pages and one of them removes its last page."""
    hashes = sequence_hashes(token_array(TOKENS), 4).tolist()
    one, two = Stream("one"), Stream("two")
    records = [
        one.batch(stored((0, hashes)), now=1000.0),
        two.batch(stored((0, hashes[:2]), tier=1), now=1001.0),
        one.batch(now=1002.0),
        one.batch(stored((hashes[-1], [77])), now=1003.0),
    ]
    with EventLogWriter(tmp_path / "log") as writer:
        for record in records:
            writer.append(record)
    return tmp_path / "log"


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    file = tmp_path / "prompt.json"
    file.write_text(json.dumps({"model_name": "m", "token_ids": TOKENS}))
    return file


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def assert_one_clear_line(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    for word in words:
        assert word in done.stderr


def test_version_prints_nothing_but_json_when_asked() -> None:
    assert "kvsight" in json.loads(kvsight("--version", "--json").stdout)


def test_a_simulation_prints_nothing_but_json_when_asked() -> None:
    done = kvsight("simulate", "--requests", 60, "--workers", 2, "--policy", "kv-aware", "--json")
    (report,) = json.loads(done.stdout)
    assert (report["policy"], report["requests"], report["divergent_pages"]) == ("kv-aware", 60, 0)


def test_a_replay_shows_scores_as_they_were(recorded: Path, prompt: Path) -> None:
    def at(moment: str) -> dict[str, list[object]]:
        answer = json.loads(kvsight("replay", recorded, "--at", moment, "--query", prompt, "--json").stdout)
        tiers = ("gpu", "cpu", "disk", "external")
        return {worker: [held[tier] for tier in tiers] for worker, held in answer["instances"].items()}

    assert at("1") == {"one": [32, 32, 32, 32]}
    assert at("@1000.5") == {"one": [32, 32, 32, 32]}
    assert at("1970-01-01T00:16:41Z") == at("2") == at("0:2") == {"one": [32, 32, 32, 32], "two": [0, 8, 8, 8]}


def test_a_replay_without_a_question_shows_the_views(recorded: Path) -> None:
    views = json.loads(kvsight("replay", recorded, "--json").stdout)
    assert [(view["worker"], view["GPU"], view["CPU_PINNED"]) for view in views] == [("one", 9, 0), ("two", 0, 2)]
    assert "one" in kvsight("replay", recorded).stdout


def test_a_replay_takes_every_question_that_the_api_takes(recorded: Path) -> None:
    hashes = sequence_hashes(token_array(TOKENS), 4).tolist()
    by_hash = kvsight(
        "replay", recorded, "--query", "-", "--json", stdin=json.dumps({"model_name": "m", "seq_hashes": hashes[:1]})
    )
    assert json.loads(by_hash.stdout)["scores"] == {"one": {"0": 4}}
    rfc = {"modelname": "m", "block_size": 4, "token_ids": TOKENS, "instance_id": "two"}
    answer = json.loads(kvsight("replay", recorded, "--query", "-", "--json", stdin=json.dumps(rfc)).stdout)
    assert {worker: held["CPU"] for worker, held in answer["default"].items()} == {"two": 8}
    assert "two" in kvsight("replay", recorded, "--query", "-", stdin=json.dumps(rfc)).stdout


def test_a_bad_option_is_refused_before_kernels_are_compiled(tmp_path: Path) -> None:
    done = kvsight("serve", environment={"KVSIGHT_PORT": "abc", "NUMBA_CACHE_DIR": str(tmp_path)})
    assert_one_clear_line(done, "kvsight: KVSIGHT_PORT: got 'abc', expected a valid integer")
    assert not [*tmp_path.iterdir()]


def test_a_port_in_use_is_one_clear_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for command in ("serve", "demo"):
            assert_one_clear_line(kvsight(command, "--port", port), "kvsight: ", str(port))


def test_a_server_that_no_engine_can_reach_reports_it(free_port: int) -> None:
    process = subprocess.Popen(
        [*KVSIGHT, "serve", "--port", str(free_port)],
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    said = ""
    while "/register" not in said and (line := process.stderr.readline()):  # the first start may compile kernels
        said += line
    with socket.create_connection(("127.0.0.1", free_port)):
        pass  # printed after the server is listening
    process.terminate()  # a shell's background jobs ignore SIGINT until uvicorn listens to it
    process.communicate(timeout=20)
    assert f"http://127.0.0.1:{free_port}" in said
    assert "--kafka" in said
    assert "/register" in said


@pytest.fixture
def server(recorded: Path, tmp_path: Path) -> Iterator[str]:
    """`kvsight serve` following the recorded log, with snapshots in a folder."""
    with served_log(recorded, "--snapshot-dir", tmp_path / "snapshots") as url:
        yield url
    assert (tmp_path / "snapshots" / "views.kvsnap").is_file()


def test_a_served_log_answers_queries(server: str, prompt: Path) -> None:
    answer = json.loads(kvsight("query", prompt, "--url", server, "--json").stdout)
    assert answer["instances"]["one"]["gpu"] == 32
    assert answer["instances"]["two"]["cpu"] == 8
    table = kvsight("query", prompt, "--url", server).stdout
    assert "one" in table
    assert "two" in table
    unknown = kvsight("query", "-", "--url", server, stdin='{"model_name": "x", "token_ids": [1]}')
    assert_one_clear_line(unknown, "x")


def test_the_demo_ends_by_itself_and_shows_policies_and_an_answer(free_port: int) -> None:
    heedless = {"KVSIGHT_API_TOKEN": "secret", "KVSIGHT_TENANT": "t", "KVSIGHT_MAX_STREAMS": "1"}
    done = kvsight("demo", "--exit", "--port", free_port, "--requests", 320, environment=heedless)
    assert done.returncode == 0, done.stderr
    for word in ("kv-aware", "round-robin", "random", "/query", "worker-", "live", f"127.0.0.1:{free_port}"):
        assert word in done.stdout + done.stderr
    addresses = [word for word in done.stdout.split() if word.startswith("http://")]
    assert addresses[0] == f"http://127.0.0.1:{free_port}"  # the page


def test_the_demo_of_a_tiered_fleet_shows_gpu_below_cpu_below_disk(free_port: int) -> None:
    done = kvsight("demo", "--exit", "--port", free_port, "--requests", 360, "--cache", "hiradix")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("worker-") and "live" in line]
    assert any(0 < int(gpu) < int(cpu) < int(disk) for _, _, gpu, cpu, disk, *_ in rows), done.stdout


def test_the_demo_ends_cleanly_on_ctrl_c_and_its_engines_say_goodbye(free_port: int) -> None:
    process = subprocess.Popen(
        [*KVSIGHT, "demo", "--port", str(free_port), "--requests", "320"],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    line = ""
    while "Ctrl-C" not in line:
        line = process.stderr.readline()
        assert line, process.communicate()
    with Client(f"http://127.0.0.1:{free_port}") as client:
        events = client.events()
        next(events)
        process.send_signal(signal.SIGINT)
        states = {event.instance_id: (event.state, event.reason) for event in events if isinstance(event, StateChanged)}
    assert states == {f"worker-{number}": ("expired", CLOSED) for number in range(4)}
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors


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
