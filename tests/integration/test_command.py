"""The command as a real process: its streams and its exit code."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kv_events.hashing import sequence_hashes, token_array
from kv_events.log.event_log import EventLogWriter
from kv_events.schema import CLOSED
from kvsight import Client, StateChanged
from tests.support.commands import ENVIRONMENT, KVSIGHT, kvsight
from tests.support.log.records import Stream, stored
from tests.support.waiting import wait_until

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


def test_help_teaches_every_command() -> None:
    done = kvsight("--help")
    assert done.returncode == 0
    for command in ("demo", "serve", "query", "hash", "simulate", "engine", "record", "replay", "version"):
        assert command in done.stdout
        assert kvsight(command, "--help").returncode == 0


def test_version_prints_nothing_but_json_when_asked() -> None:
    assert "kvsight" in json.loads(kvsight("version", "--json").stdout)


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


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"token_ids": None}, ("token_ids", "None")),
        ({"token_ids": 5}, ("token_ids", "5")),
        ({"token_ids": [], "lora_name": 5}, ("lora_name", "5")),
        ({}, ("token_ids", "missing")),
        ({"model_name": 3, "token_ids": []}, ("model_name", "3")),
    ],
)
def test_a_bad_question_to_a_replay_is_one_clear_line(
    recorded: Path, fields: dict[str, object], words: tuple[str, ...]
) -> None:
    done = kvsight("replay", recorded, "--query", "-", stdin=json.dumps({"model_name": "m", **fields}))
    assert_one_clear_line(done, *words)


def test_a_deeply_nested_question_is_one_clear_line(recorded: Path) -> None:
    for depth in (950, 50_000):
        body = '{"model_name": "m", "token_ids": ' + "[" * depth + "]" * depth + "}"
        assert_one_clear_line(kvsight("replay", recorded, "--query", "-", stdin=body))
        assert_one_clear_line(kvsight("query", "-", "--url", "http://127.0.0.1:9", stdin=body))


@pytest.mark.parametrize("moment", ["soon", "-1", "@x", "1.5.2", "@nan", "@inf", "9" * 5000])
def test_a_moment_that_is_none_is_one_clear_line(recorded: Path, moment: str) -> None:
    assert_one_clear_line(kvsight("replay", recorded, f"--at={moment}"), moment[:40])


def test_unknown_paths_are_one_clear_line(tmp_path: Path, recorded: Path) -> None:
    assert_one_clear_line(kvsight("replay", tmp_path / "nowhere"), "nowhere")
    assert_one_clear_line(kvsight("replay", recorded, "--query", tmp_path / "no.json"), "no.json")
    assert_one_clear_line(kvsight("query", tmp_path / "no.json"), "no.json")
    assert_one_clear_line(kvsight("simulate", "--trace", tmp_path / "no.jsonl"), "no.jsonl")


def test_bad_json_is_one_clear_line_with_its_place(tmp_path: Path) -> None:
    assert_one_clear_line(kvsight("query", "-", stdin='{\n "model_name": oops}'), "line 2")
    assert_one_clear_line(kvsight("query", "-", stdin="[1, 2]"), "object")
    trace = tmp_path / "bad.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n{"timestamp": -1}\n')
    assert_one_clear_line(kvsight("simulate", "--trace", trace), "line 2")


def test_an_unknown_model_is_one_clear_line_with_the_known_ones(recorded: Path) -> None:
    done = kvsight("replay", recorded, "--query", "-", stdin='{"model_name": "other", "token_ids": []}')
    assert_one_clear_line(done, "other", "known: m")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("KVSIGHT_WORKER_TTL_S", "-3", ("KVSIGHT_WORKER_TTL_S: got '-3'",)),
        ("KVSIGHT_REDIS", "foo://user:secret@host", ("KVSIGHT_REDIS", "foo://...@host", "redis://")),
    ],
)
def test_a_bad_setting_is_one_clear_line(name: str, value: str, words: tuple[str, ...]) -> None:
    done = kvsight("serve", "--port", 0, environment={name: value})
    assert_one_clear_line(done, *words)
    assert "secret" not in done.stderr


def test_a_folder_that_cannot_be_written_is_one_clear_line() -> None:
    assert_one_clear_line(kvsight("serve", "--port", 0, "--dead-letter-dir", "/proc/nope"), "/proc/nope")


@pytest.mark.parametrize(
    ("arguments", "environment", "line"),
    [
        (["serve"], {"KVSIGHT_PORT": "abc"}, "KVSIGHT_PORT: got 'abc', expected a valid integer"),
        (["serve", "--port", "abc"], {"KVSIGHT_PORT": "9"}, "--port: got 'abc', expected a valid integer"),
        (["serve"], {"KVSIGHT_KAFKA_TLS": "maybe"}, "KVSIGHT_KAFKA_TLS: got 'maybe', expected a valid boolean"),
        (
            ["serve", "--log-level", "loud"],
            {},
            "--log-level: got 'loud', expected one of 'debug', 'info', 'warning', 'error'",
        ),
        (["tail", "-n", "0"], {}, "--limit: got '0', expected a number greater than or equal to 1"),
        (["simulate", "--capacity", "3"], {}, "--capacity: got 3, expected a positive multiple of the page size 64"),
        (["simulate", "--policy", "best"], {}, "--policy: got 'best', expected one of random, round-robin, kv-aware"),
    ],
)
def test_a_bad_option_is_one_line_that_names_what_was_set(
    arguments: list[str], environment: dict[str, str], line: str, tmp_path: Path
) -> None:
    done = kvsight(*arguments, environment={**environment, "NUMBA_CACHE_DIR": str(tmp_path)})
    assert (done.returncode, done.stderr) == (2, f"kvsight: {line}\n")
    assert not [*tmp_path.iterdir()]  # no kernel was compiled before


def test_an_address_without_a_server_is_one_clear_line(prompt: Path, free_port: int) -> None:
    assert_one_clear_line(kvsight("query", prompt, "--url", f"http://127.0.0.1:{free_port}"), str(free_port))


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
def server(recorded: Path, free_port: int, tmp_path: Path) -> Iterator[str]:
    """`kvsight serve` following the recorded log, with snapshots in a folder."""
    command = [*KVSIGHT, "serve", "--port", str(free_port), "--event-log-dir", str(recorded)]
    settings = {"KVSIGHT_WORKER_TTL_S": "1000000000000", "KVSIGHT_FORGET_AFTER_S": "1000000000000"}
    process = subprocess.Popen(
        [*command, "--snapshot-dir", str(tmp_path / "snapshots")], env=ENVIRONMENT | settings, stderr=subprocess.PIPE
    )
    url = f"http://127.0.0.1:{free_port}"

    def ready() -> bool:
        assert process.poll() is None, process.communicate()
        try:
            return httpx.get(f"{url}/ready").status_code == 200
        except httpx.TransportError:
            return False

    wait_until(ready, deadline_s=60, what="kvsight serve to be ready")
    yield url
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode in (0, 130), errors
    assert b"Traceback" not in errors
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


def test_an_unknown_cache_is_one_clear_line_with_the_known_ones() -> None:
    for command in ("demo", "simulate"):
        assert_one_clear_line(kvsight(command, "--cache", "best"), "cache", "himamba")


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


def test_a_topic_is_recorded_and_the_recording_continues(kafka_bootstrap: str, tmp_path: Path) -> None:
    simulate = ["simulate", "--requests", 40, "--workers", 2, "--policy", "random", "--kafka", kafka_bootstrap]
    log = tmp_path / "log"
    assert kvsight(*simulate).returncode == 0
    assert kvsight("record", log, "--kafka", kafka_bootstrap, "--once").returncode == 0
    first = json.loads(kvsight("replay", log, "--json").stdout)
    assert kvsight(*simulate).returncode == 0
    assert kvsight("record", log, "--kafka", kafka_bootstrap, "--once").returncode == 0
    second = json.loads(kvsight("replay", log, "--json").stdout)
    assert {view["state"] for view in first + second} <= {"live", "expired"}
    by_worker = {view["worker"]: view["epoch"] for view in first}
    assert all(view["epoch"] > by_worker[view["worker"]] for view in second)


def test_kafka_away_is_one_clear_line_for_a_recording(free_port: int, tmp_path: Path) -> None:
    done = kvsight("record", tmp_path / "log", "--kafka", f"127.0.0.1:{free_port}", "--once")
    assert done.returncode == 2
    assert str(free_port) in done.stderr
