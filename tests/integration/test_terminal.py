"""What a user sees of each command, on a terminal of 80 columns and piped."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
from aiokafka import AIOKafkaProducer
from typer.testing import CliRunner

from kv_events.hashing import sequence_hashes, token_array
from kv_events.log.event_log import EventLogWriter
from kv_events.records import LogRecord
from kvsight.cli.app import MOVED
from kvsight.cli.main import app
from kvsight.cli.shared.console import UsageError
from tests.support.commands import served_log
from tests.support.log.records import Stream, stored
from tests.support.servers.scripted_server import Reply, scripted
from tests.support.terminal import COLUMNS, ENVIRONMENT, Shown, command, on_terminal, piped

pytestmark = pytest.mark.timing("a command must show its lines within seconds")

COMMANDS = typer.main.get_group(app).commands
NAMED = [name for name, each in COMMANDS.items() if not each.hidden]
LEAVES = {
    words: leaf
    for name in NAMED
    for words, leaf in (
        {f"{name} {sub}": leaf for sub, leaf in getattr(COMMANDS[name], "commands", {}).items()}
        or {name: COMMANDS[name]}
    ).items()
}
"""Words of a command line -> command, subcommands included."""
LONG = "vllm-llama-3-70b-decode-7f9c8d6b54-xk2lp.inference.svc.cluster.local"
TOKENS = list(range(1, 33))
SCREENS: list[Callable[..., Shown]] = [on_terminal, piped]


def helped(*arguments: str) -> str:
    return CliRunner().invoke(app, [*arguments, "-h"], env={"COLUMNS": str(COLUMNS)}).stdout


@pytest.mark.parametrize("name", LEAVES)
def test_help_fits_and_every_command_has_the_common_options(name: str) -> None:
    lines = helped(*name.split()).splitlines()
    assert max(map(len, lines)) <= COLUMNS
    for parameter in LEAVES[name].params:
        text = " ".join(str(getattr(parameter, "help", None) or "").split())
        assert any(text in line for line in lines), f"{name}: {parameter.name}: {text!r} is longer than its line"
    assert {"-v", "--version"} <= {flag for parameter in LEAVES[name].params for flag in parameter.opts}
    assert CliRunner().invoke(app, [*name.split(), "--version"]).stdout.startswith("kvsight ")


def test_the_list_of_commands_has_a_whole_sentence_for_each() -> None:
    text = helped()
    for name in NAMED:
        (line,) = [line for line in text.splitlines() if line.startswith(f"  {name} ")]
        assert line.endswith("."), line
        assert not line.endswith("..."), line


@pytest.mark.parametrize(
    ("words", "said"),
    [(name, f"kvsight: `kvsight {name}` is now: kvsight {new}\n") for name, new in MOVED.items()]
    + [("log cat LOG --limit 3", "kvsight: `kvsight log cat` is now: kvsight tail --log LOG --full\n")],
)
def test_a_command_of_the_version_before_names_its_new_form(words: str, said: str) -> None:
    done = CliRunner().invoke(app, words.split())
    assert isinstance(done.exception, UsageError)
    assert f"kvsight: {done.exception}\n" == said
    new = said.partition(": kvsight ")[2].split()
    assert new[0] in LEAVES or " ".join(new[:2]) in LEAVES or new[0].startswith("--")


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
    with EventLogWriter(folder) as writer:
        for record in records:
            writer.append(record)
    return folder


@pytest.fixture(scope="module")
def url(recorded: Path) -> Iterator[str]:
    """`kvsight serve` of the recorded log, for an impatient user."""
    with served_log(recorded, interrupts=2) as url:
        yield url


@pytest.mark.parametrize("screen", SCREENS)
def test_a_replay_shows_whole_names_and_says_why_others_are_absent(
    screen: Callable[..., Shown], recorded: Path, tmp_path: Path
) -> None:
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps({"model_name": "m", "token_ids": TOKENS}))
    shown = screen("replay", recorded, "--query", prompt)
    assert shown.code == 0
    lines = shown.output.splitlines()
    question = "prompt of 32 tokens, 8 pages; asked 4 workers of model m, pages of 4 tokens"
    del lines[: lines.index(question)]  # kernels may have been compiled first
    assert lines[1].split()[:1] == ["worker"]
    assert "external" not in lines[1]
    assert "disk" not in lines[1]
    assert [line.split()[0] for line in lines[2:4]] == [LONG, "engine-2"]
    assert "engine-9: does not hold the first page" in lines
    assert any(line.startswith("engine-10: expired, last heard 60.") for line in lines), shown.output


@pytest.mark.parametrize("screen", SCREENS)
def test_workers_are_listed_uncut_in_natural_order(screen: Callable[..., Shown], url: str) -> None:
    shown = screen("top", "--ranks", "--once", "--url", url)
    assert shown.code == 0
    lines = shown.output.splitlines()
    assert lines[0] == "model m, pages of 4 tokens: 4 workers"
    assert [line.split()[0] for line in lines[2:6]] == ["engine-2", "engine-9", "engine-10", LONG]
    assert all(re.search(r"\b(live|stale)\b", line) for line in lines[2:6])  # stale once two heartbeats are missing
    assert max(map(len, lines)) <= COLUMNS


def test_workers_print_the_answer_of_the_api(url: str) -> None:
    listed = json.loads(piped("top", "--ranks", "--once", "--url", url, "--json").output)
    assert {worker["instance_id"] for worker in listed} == {LONG, "engine-2", "engine-9", "engine-10"}
    assert json.loads(piped("top", "--ranks", "--once", "--url", url, "--model", "other", "--json").output) == []
    assert (
        piped("top", "--ranks", "--once", "--url", url, "--model", "other").output
        == "no worker is known for model other\n"
    )


@pytest.mark.parametrize("screen", SCREENS)
def test_a_query_is_given_by_tokens(screen: Callable[..., Shown], url: str) -> None:
    shown = screen("query", "--url", url, "--model", "m", "--tokens", "1,2,3")
    assert shown.code == 0
    assert shown.output.startswith("3 tokens: less than one page of 4; asked 4 workers of model m")
    shown = screen("query", "--url", url, "--model", "m", "--tokens", "9 9 9 9")
    assert "No worker holds its first page." in shown.output


def test_tokens_and_text_come_from_files_too(url: str, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(json.dumps(TOKENS))
    shown = piped("query", "--url", url, "--model", "m", "--tokens", f"@{tmp_path / 'tokens'}", "--json")
    assert json.loads(shown.output)["instances"][LONG]["gpu"] == 32


async def test_text_is_tokenized_by_an_engine(url: str) -> None:
    async with scripted(Reply(body=json.dumps({"tokens": TOKENS, "count": 32}).encode())) as engine:
        asked = ("query", "--url", url, "--model", "m", "--text", "Hello", "--tokenize-url", engine.url, "--json")
        shown = await asyncio.to_thread(piped, *asked)
    assert json.loads(engine.requests[0].body) == {"model": "m", "prompt": "Hello"}
    assert engine.requests[0].line.startswith("POST /tokenize ")
    assert json.loads(shown.output)["instances"][LONG]["gpu"] == 32


def test_tail_shows_the_states_of_the_views_first(url: str) -> None:
    shown = piped("tail", "--url", url, "--kind", "state", "--limit", 4)
    assert shown.code == 0
    assert sum(re.search(" -> (live|stale)", line) is not None for line in shown.output.splitlines()) == 4
    assert LONG in shown.output
    events = [json.loads(line) for line in piped("tail", "--url", url, "-n", 2, "--json").output.splitlines()]
    assert [event["kinds"] for event in events] == [["state"], ["state"]]


@pytest.mark.parametrize("screen", SCREENS)
def test_tail_shows_the_records_of_a_log(screen: Callable[..., Shown], recorded: Path) -> None:
    shown = screen("tail", "--log", recorded, "--from-beginning", "--kind", "stored", "--medium", "cpu", "-n", 1)
    assert shown.code == 0
    assert shown.output.rstrip().endswith("engine-2 rank 1  m  seq 0: stored 2 cpu")
    record = json.loads(piped("tail", "--log", recorded, "--from-beginning", "-n", 1, "--json").output)
    assert (record["worker"], record["stored"], record["partition"]) == ("engine-10", {"GPU": 8}, 0)


def test_tail_shows_the_records_of_a_topic(kafka_bootstrap: str) -> None:
    topic = uuid.uuid4().hex
    process = subprocess.Popen(
        command("tail", "--kafka", kafka_bootstrap, "--events-topic", topic, "--from-beginning", "-n", 1, "--json"),
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
    )
    asyncio.run(publish(kafka_bootstrap, topic, Stream("engine-0").batch(stored((0, [1, 2, 3])))))
    shown, _ = process.communicate(timeout=60)
    event = json.loads(shown)
    assert (event["worker"], event["kinds"], event["stored"], event["offset"]) == (
        "engine-0",
        ["stored"],
        {"GPU": 3},
        0,
    )


async def publish(bootstrap: str, topic: str, record: LogRecord) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap)
    await producer.start()
    try:
        await producer.send_and_wait(topic, record.payload, key=record.key)
    finally:
        await producer.stop()


@pytest.mark.parametrize("screen", SCREENS)
def test_a_simulation_explains_its_columns(screen: Callable[..., Shown]) -> None:
    shown = screen("simulate", "--requests", 30, "--workers", 10, "--policy", "kv-aware")
    assert shown.code == 0
    titles = " ".join(shown.output.split())
    for words in ("requests/worker", "Mtokens computed", "min/mean/max", "wrong", "pages"):
        assert words in titles
    assert max(map(len, shown.output.splitlines())) <= COLUMNS


def test_an_interrupted_command_ends_without_a_traceback() -> None:
    process = subprocess.Popen(
        command("simulate", "--requests", 100_000, "--workers", 2), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    time_to_start = time.monotonic() + 60
    while "numba" not in (maps := Path(f"/proc/{process.pid}/maps").read_text()) and time.monotonic() < time_to_start:
        os.sched_yield()
    assert maps
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors
    assert process.returncode in (130, -signal.SIGINT)
