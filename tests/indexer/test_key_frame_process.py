"""The process that writes key frames beside a recording: it follows the log, and ends with its parent in any case."""

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from indexer.recording.recorder import Recorder, RecordingThread
from indexer.replay import Timeline
from indexer.replay.log_indexer import indexing
from indexer.settings import IndexerSettings
from kv_events.log.event_log import EventLogWriter
from kv_events.log.moments import LogMoment
from tests.support.log.late_log import write_log
from tests.support.log.records import Stream, stored
from tests.support.waiting import async_wait_until

SETTINGS = IndexerSettings(max_pages=1000)
DEADLINE_S = 60.0

_PARENT = """
import asyncio, sys
from pathlib import Path
from indexer.replay.log_indexer import indexing

async def run():
    async with indexing(Path(sys.argv[1])):
        print("runs", flush=True)
        await asyncio.sleep(600)

asyncio.run(run())
"""


def write(folder: Path, number: int, segment_bytes: int = 1500) -> None:
    """Write batches of one worker in several segments."""
    stream = Stream("w")
    records = (stream.batch(stored((0, [page])), now=1000 + page) for page in range(1, number + 1))
    write_log(folder, records, segment_bytes)


def boundaries(folder: Path) -> list[int]:
    """The indices at which the segments begin, except for the first one."""
    return [int(path.stem) for path in sorted(folder.glob("*.kvlog"))[1:]]


def frames(folder: Path) -> list[int]:
    return [int(path.stem) for path in sorted(folder.glob("*.kvframe"))]


def delete_all_but_the_newest(folder: Path) -> int:
    """Delete old segments. Returns the index of the first record that is left."""
    *old, newest = sorted(folder.glob("*.kvlog"))
    for path in old:
        path.unlink()
    return int(newest.stem)


def command_of(process: psutil.Process) -> list[str]:
    """Return the command line of a process. Empty if it has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def indexers(folder: Path, parent: int | None = None) -> list[int]:
    """The processes that index a log, once they run: a new process has its parent's command for a moment, then none."""
    own = psutil.Process(parent)
    commands = {child.pid: command_of(child) for child in own.children()}
    return [pid for pid, command in commands.items() if str(folder) in " ".join(command) and command != command_of(own)]


async def test_a_recording_beside_a_service_writes_key_frames_with_the_settings_of_the_service(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, segment_bytes=1500)
    stream = Stream("w")
    async with RecordingThread(recorder, beside=lambda: indexing(tmp_path, SETTINGS)).running():
        for page in range(1, 41):
            recorder.offer(stream.batch(stored((0, [page])), now=1000 + page))
        await async_wait_until(lambda: recorder.written == 40, DEADLINE_S, "the records")
        await async_wait_until(lambda: frames(tmp_path) == boundaries(tmp_path), DEADLINE_S, "the key frames")
        (pid,) = indexers(tmp_path)
        assert os.getpgid(pid) == pid  # Ctrl-C in a terminal is not for it
        assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    assert not indexers(tmp_path)
    first = delete_all_but_the_newest(tmp_path)
    timeline = Timeline(tmp_path, SETTINGS)
    assert timeline.at(LogMoment(index=first)).applier.records == first == timeline.first_index > 0
    assert timeline.faults == []


async def test_a_process_that_dies_is_named_and_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 20)
    async with indexing(tmp_path, SETTINGS):
        await async_wait_until(lambda: frames(tmp_path), DEADLINE_S, "the key frames")
        (pid,) = indexers(tmp_path)
        os.kill(pid, signal.SIGTERM)  # it ends with its parent, not before
        os.kill(pid, signal.SIGKILL)
        await async_wait_until(lambda: indexers(tmp_path) not in ([], [pid]), DEADLINE_S, "another process")
        with EventLogWriter(tmp_path, segment_bytes=1) as writer:
            writer.append(Stream("later").batch(now=2000))
        await async_wait_until(lambda: frames(tmp_path) == boundaries(tmp_path), DEADLINE_S, "the later key frame")
    assert "the process of the key frames ended with -9" in caplog.text


async def test_what_stops_the_process_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with indexing(tmp_path / "nowhere", SETTINGS):
        await async_wait_until(lambda: "nowhere: no such folder" in caplog.text, DEADLINE_S, "the reason")


async def test_the_process_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    write(tmp_path, 20)
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _PARENT, str(tmp_path), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        assert parent.stdout is not None
        assert await parent.stdout.readline() == b"runs\n"
        await async_wait_until(lambda: indexers(tmp_path, parent.pid), DEADLINE_S, "the process")
        (pid,) = indexers(tmp_path, parent.pid)
        indexer = psutil.Process(pid)
    finally:
        with suppress(ProcessLookupError):
            parent.kill()
        await parent.wait()
    await async_wait_until(lambda: not command_of(indexer), DEADLINE_S, "the end of the process")
