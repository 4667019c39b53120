"""What a user sees of each command, on a terminal of 80 columns and piped."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kv_events.hashing import sequence_hashes, token_array
from tests.support.commands import ENVIRONMENT, KVSIGHT, RunningCommand, kvsight, served_log
from tests.support.log.late_log import write_log
from tests.support.log.records import Stream, stored
from tests.support.servers.kafka_broker import produce
from tests.support.servers.scripted_server import Reply, scripted
from tests.support.terminal import COLUMNS, Screen, on_terminal
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timing("a command must show its lines within seconds")

LONG = "vllm-llama-3-70b-decode-7f9c8d6b54-xk2lp.inference.svc.cluster.local"
TOKENS = list(range(1, 33))
Shown = Callable[..., subprocess.CompletedProcess[str]]
SCREENS: list[Shown] = [on_terminal, kvsight]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An event log of four workers: two hold the prompt, one other pages, and one was silent in the end."""
    hashes = sequence_hashes(token_array(TOKENS), 4).tolist()
    now = time.time()
    silent, first, second, third = Stream("engine-10"), Stream(LONG), Stream("engine-2", dp_rank=1), Stream("engine-9")
    records = [
        silent.batch(stored((0, hashes)), now=now - 60),
        third.batch(stored((0, [71, 72])), now=now - 59),
        *(third.batch(now=now - age) for age in range(56, 3, -4)),
        first.batch(stored((0, hashes)), now=now - 1),
        second.batch(stored((0, hashes[:2]), tier=1), now=now - 0.9),
        *(stream.batch(now=now) for stream in (first, second, third)),
    ]
    folder = tmp_path_factory.mktemp("recorded") / "log"
    write_log(folder, records)
    return folder


@pytest.fixture(scope="module")
def url(recorded: Path) -> Iterator[str]:
    """`kvsight serve` of the recorded log, for an impatient user."""
    with served_log(recorded, interrupts=2) as url:
        yield url


def test_a_service_that_is_interrupted_leaves_a_snapshot(recorded: Path, tmp_path: Path) -> None:
    with served_log(recorded, "--snapshot-dir", tmp_path) as url:
        unknown = kvsight("query", "--url", url, "--model", "x", "--tokens", "1")
    assert (tmp_path / "views.kvsnap").is_file()
    assert (unknown.returncode, unknown.stdout, unknown.stderr.count("\n")) == (2, "", 1)
    assert "model=x" in unknown.stderr


@pytest.mark.parametrize("screen", SCREENS)
def test_a_replay_shows_whole_names_and_says_why_others_are_absent(
    screen: Shown, recorded: Path, tmp_path: Path
) -> None:
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps({"model_name": "m", "token_ids": TOKENS}))
    shown = screen("replay", recorded, "--query", prompt)
    assert shown.returncode == 0
    lines = shown.stdout.splitlines()
    question = "prompt of 32 tokens, 8 pages; asked 4 workers of model m, pages of 4 tokens"
    del lines[: lines.index(question)]  # kernels may have been compiled first
    assert lines[1].split()[:1] == ["worker"]
    assert "external" not in lines[1]
    assert "disk" not in lines[1]
    assert [line.split()[0] for line in lines[2:4]] == [LONG, "engine-2"]
    assert "engine-9: does not hold the first page" in lines
    assert any(line.startswith("engine-10: expired, last heard 60.") for line in lines), shown.stdout


@pytest.mark.parametrize(
    ("words", "bars"), [("audit LOG", ["auditing"]), ("replay LOG --diff", ["replaying", "comparing"])]
)
def test_reading_a_log_shows_how_far_it_is(recorded: Path, tmp_path: Path, words: str, bars: list[str]) -> None:
    """On a terminal only: elsewhere, each step would be a line."""
    command = [recorded if word == "LOG" else word for word in words.split()]
    if "--diff" in command:
        command.append(shutil.copytree(recorded, tmp_path / "copy"))
    with Screen(*command) as screen:
        assert screen.end(180) == 0
    assert all(bar in screen.text for bar in bars)
    assert kvsight(*command).stderr.count("MiB") == 0


@pytest.mark.parametrize("screen", SCREENS)
def test_workers_are_listed_uncut_in_natural_order(screen: Shown, url: str) -> None:
    shown = screen("top", "--ranks", "--once", "--url", url)
    assert shown.returncode == 0
    lines = shown.stdout.splitlines()
    assert lines[0] == "model m, pages of 4 tokens: 4 workers"
    assert [line.split()[0] for line in lines[2:6]] == ["engine-2", "engine-9", "engine-10", LONG]
    assert all(re.search(r"\b(live|stale)\b", line) for line in lines[2:6])  # stale once two heartbeats are missing
    assert max(map(len, lines)) <= COLUMNS


def test_workers_of_an_unknown_model_are_an_error_that_names_the_known_ones(url: str) -> None:
    words = ("top", "--ranks", "--once", "--url", url, "--model", "other")
    shown, listed = kvsight(*words), kvsight(*words, "--json")
    assert (shown.returncode, shown.stdout) == (listed.returncode, "") == (2, "")
    assert "no worker is known for model other; known: model m" in shown.stderr
    assert json.loads(listed.stdout) == []


@pytest.mark.parametrize("screen", SCREENS)
def test_a_query_is_given_by_tokens(screen: Shown, url: str) -> None:
    shown = screen("query", "--url", url, "--model", "m", "--tokens", "1,2,3")
    assert shown.returncode == 0
    assert shown.stdout.startswith("3 tokens: less than one page of 4; asked 4 workers of model m")
    shown = screen("query", "--url", url, "--model", "m", "--tokens", "9 9 9 9")
    assert "No worker holds its first page." in shown.stdout


async def test_tokens_come_from_a_file_and_text_is_tokenized_by_an_engine(url: str, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(json.dumps(TOKENS))
    async with scripted(Reply(body=json.dumps({"tokens": TOKENS, "count": 32}).encode())) as engine:
        for prompt in (("--tokens", f"@{tmp_path / 'tokens'}"), ("--text", "Hello", "--tokenize-url", engine.url)):
            words = ("query", "--url", url, "--model", "m", *prompt, "--json")
            shown = await asyncio.to_thread(kvsight, *words)
            assert json.loads(shown.stdout)["instances"][LONG]["gpu"] == 32
    assert json.loads(engine.requests[0].body) == {"model": "m", "prompt": "Hello"}
    assert engine.requests[0].line.startswith("POST /tokenize ")


def test_tail_shows_the_states_of_the_views_first(url: str) -> None:
    shown = kvsight("tail", "--url", url, "--kind", "state", "--limit", 4)
    assert shown.returncode == 0
    assert sum(re.search(" -> (live|stale)", line) is not None for line in shown.stdout.splitlines()) == 4
    assert LONG in shown.stdout
    events = [json.loads(line) for line in kvsight("tail", "--url", url, "-n", 2, "--json").stdout.splitlines()]
    assert [event["kinds"] for event in events] == [["state"], ["state"]]


@pytest.mark.parametrize("screen", SCREENS)
def test_tail_shows_the_records_of_a_log(screen: Shown, recorded: Path) -> None:
    shown = screen("tail", "--log", recorded, "--from-beginning", "--kind", "stored", "--medium", "cpu", "-n", 1)
    assert shown.returncode == 0
    assert shown.stdout.rstrip().endswith("engine-2 rank 1  m  seq 0: stored 2 cpu")
    record = json.loads(kvsight("tail", "--log", recorded, "--from-beginning", "-n", 1, "--json").stdout)
    assert (record["worker"], record["stored"], record["partition"]) == ("engine-10", {"GPU": 8}, 0)


def test_tail_shows_the_records_of_a_topic(kafka_bootstrap: str) -> None:
    topic = uuid.uuid4().hex
    words = f"tail --kafka {kafka_bootstrap} --events-topic {topic} --from-beginning -n 1 --json"
    with RunningCommand(*words.split()) as command:
        asyncio.run(produce(kafka_bootstrap, topic, [Stream("engine-0").batch(stored((0, [1, 2, 3])))]))
        assert command.end() == 0
    event = json.loads(command.out)
    facts = (event["worker"], event["kinds"], event["stored"], event["offset"])
    assert facts == ("engine-0", ["stored"], {"GPU": 3}, 0)


@pytest.mark.parametrize("screen", SCREENS)
def test_a_simulation_explains_its_columns(screen: Shown) -> None:
    shown = screen("simulate", "--requests", 30, "--workers", 10, "--policy", "overlap-load")
    assert shown.returncode == 0
    titles = " ".join(shown.stdout.split())
    for words in ("requests/worker", "Mtokens computed", "min/mean/max", "wrong", "pages"):
        assert words in titles
    assert max(map(len, shown.stdout.splitlines())) <= COLUMNS


def test_an_interrupted_command_ends_without_a_traceback() -> None:
    """An import may swallow the first Ctrl-C. The next one ends the process at once."""
    with subprocess.Popen(
        [*KVSIGHT, "simulate", "--requests", "100000", "--workers", "2"],
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        wait_until(lambda: "numba" in maps.read_text(), 60, "the imports")
        process.send_signal(signal.SIGINT)

        def is_ended() -> bool:
            process.send_signal(signal.SIGINT)
            return process.poll() is not None

        wait_until(is_ended, 60, "the end")
        _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors
    assert process.returncode in (130, -signal.SIGINT)


def test_a_signal_ends_the_first_process_of_a_container_which_has_no_default_action() -> None:
    container = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if not os.environ.get("CI") and subprocess.run([*container, "true"], capture_output=True).returncode:
        pytest.skip("this system has no user namespaces for unprivileged processes")
    with subprocess.Popen(
        [*container, *KVSIGHT, "top", "--url", "http://127.0.0.1:1"], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            assert "no answer since" in process.stderr.readline()
            os.kill(int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()), signal.SIGTERM)
            assert process.wait(60) == 128 + signal.SIGTERM
        finally:
            process.kill()
