"""The worked example: its five commands print what the page says, and the script makes its recording."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kv_events.codec import decode_batch
from kv_events.log.event_log import EventLogReader
from kv_events.records import Channel
from tests.support.commands import kvsight

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PAGE = (EXAMPLES / "debug_a_routing_anomaly.md").read_text()
RECORDING = "routing_anomaly"


def shown() -> Iterator[tuple[list[str], list[str]]]:
    """Yield the words of each command, and the lines of its output that the page shows."""
    for block in re.findall(r"^```console\n\$ (.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        command, *lines = block.splitlines()
        yield shlex.split(command), [line for line in lines if line != "..."]


def test_five_commands_find_the_cause_as_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(EXAMPLES / RECORDING, tmp_path / RECORDING)
    monkeypatch.chdir(tmp_path)
    commands = list(shown())
    assert len(commands) == 5
    for words, lines in commands:
        done = kvsight(*words[1:], environment={"TZ": "UTC"})
        assert (words[0], done.returncode) == ("kvsight", 0), done.stderr
        output = done.stdout.splitlines()
        for line in lines:
            begin, is_cut, _ = line.partition("...")
            found = [at for at, real in enumerate(output) if (real.startswith(begin) if is_cut else real == line)]
            assert found, f"{shlex.join(words)} does not print:\n{line}\nbut:\n{done.stdout}"
            output = output[found[0] + 1 :]
    assert "--channel" not in PAGE
    batch = msgspec.json.decode(done.stdout)  # of the last command: one record, so no decision is beside it
    removed, stored = batch["events"]
    assert (len(removed["sequence_hashes"]), len(stored["sequence_hashes"])) == (128, 96)
    assert stored["chains"] == [{"start": 0, "parent": 0}]


def test_the_script_makes_the_recording(tmp_path: Path) -> None:
    runpy.run_path(str(EXAMPLES / "record_a_routing_anomaly.py"))["record"](tmp_path)
    assert list(contents(tmp_path)) == list(contents(EXAMPLES / RECORDING))


def contents(folder: Path) -> Iterator[tuple[Any, ...]]:
    """Yield each record without the epochs of the publishers, which are those of the run that made them."""
    for _, record in EventLogReader(folder).read():
        if record.channel == Channel.EVENTS:
            batch = decode_batch(record.payload)
            steps = [str(step) for step in batch.steps]
            yield record.offset, record.timestamp_ms, batch.stream, batch.seq, steps, batch.digest.tobytes()
        else:
            yield record


def test_the_recording_is_small() -> None:
    assert sum(file.stat().st_size for file in (EXAMPLES / RECORDING).iterdir()) < 200_000
