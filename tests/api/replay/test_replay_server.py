"""`kvsight replay --serve` as a process."""

import re
import signal
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from kv_events.log.event_log import EventLogWriter
from kvsight.cli.main import app
from tests.support.commands import RunningCommand
from tests.support.log.records import Stream, stored


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log of ten records, with a torn tail."""
    stream, folder = Stream("w"), tmp_path / "run.log"
    with EventLogWriter(folder) as writer:
        for i in range(10):
            writer.append(stream.batch(stored((0, [i + 1])), now=1000 + i))
    (segment,) = folder.glob("*.kvlog")
    segment.write_bytes(segment.read_bytes() + b"\x01\x02\x03")
    return folder


def test_a_log_is_served_until_ctrl_c_and_its_damage_is_named(log: Path) -> None:
    with RunningCommand("replay", log, "--serve", "--port", 0, "--at", 4) as command:
        command.wait_for("(docs at /docs)")
        found = re.search(r"is served on (http://\S+)", command.err)
        assert found is not None, command.err
        with httpx.Client(base_url=found[1], timeout=60) as client:
            assert client.get("/moment").json()["index"] == 4
            assert [each["instance_id"] for each in client.get("/workers?at=@1007").json()] == ["w"]
            assert "a torn tail of 3 bytes" in client.get("/span").json()["damage"][0]
            assert "<title>kvsight</title>" in client.get("/").text
        code = command.end(signal.SIGINT)
    assert (code, "Traceback" in command.err) == (130, False), command.err
    assert "damaged: " in command.err


def test_mistakes_are_named_before_anything_is_served(log: Path, tmp_path: Path) -> None:
    for arguments, words in [
        (("--serve",), "give the folder of an event log"),
        ((log, "--serve", "--json"), "give either --serve or --json, not both"),
        ((log, "--serve", "--at", "99"), "--at 99 is behind the end of the log, whose moments are 1 to 10"),
        ((log, "--serve", "--at", "soon"), "--at: got 'soon', expected a time"),
        ((tmp_path / "none", "--serve"), "no such folder"),
    ]:
        result = CliRunner().invoke(app, ["replay", *map(str, arguments)])
        assert result.exit_code != 0
        assert words in str(result.exception), (result.stderr, result.exception)
