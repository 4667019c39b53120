"""Processes for work that would delay a service in a thread.

A helper runs at a low priority. It ends when its stdin does, which is when its parent has died in any way.
It may get a job: the first line of stdin, as JSON. It writes its results to stdout as JSON, one a line. What it writes
to stderr is logged.
"""

import asyncio
import logging
import os
import signal
import sys
import threading
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path

import msgspec

from kv_events.errors import KvsightError

logger = logging.getLogger(__name__)

_NICENESS = 10
_FIRST_TO_GO = "500"
"""Added to what the kernel thinks of a helper when memory runs out, of at most 1000."""
_LONGEST_LINE = 64 * 2**20


class HelperEndedError(KvsightError):
    """A helper has ended with an error."""


def become_helper() -> None:
    """Make this process a helper. Signals of a terminal or a supervisor are for its parent.

    A job must have been read before.
    """
    os.nice(_NICENESS)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_GO)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_stdin, daemon=True).start()


def write_result(result: object) -> None:
    """Send a result to the parent."""
    sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
    sys.stdout.buffer.flush()


async def helper_results(name: str, module: str, *arguments: str, job: object = None) -> AsyncGenerator[bytes, None]:
    """Run `python -m module` as a helper, and yield its results. It is ended with the generator.

    name: of its work, for the log. job: None: it gets none. Raises HelperEndedError.
    """
    process = await _started(module, *arguments)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    messages = asyncio.create_task(_log_lines(name, process.stderr))
    try:
        if job is not None:
            line = msgspec.json.encode(job) + b"\n"
            with suppress(RuntimeError):  # of uvloop, if the process has ended; its exit code is reported
                process.stdin.write(line)
        async for line in process.stdout:
            yield line
        await messages
        if await process.wait():
            raise HelperEndedError(f"the process of the {name} ended with {process.returncode}")
    finally:
        messages.cancel()
        await _end(process)


async def _started(module: str, *arguments: str) -> Process:
    """Start a process. If this is cancelled, the process is ended first: uvloop would lose it."""
    command = sys.executable, "-P", "-m", module, *arguments
    starting = asyncio.create_task(
        asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=_LONGEST_LINE,
            start_new_session=True,  # Ctrl-C in a terminal is for this process
        )
    )  # fmt: skip
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.shield(asyncio.create_task(_end_started(starting)))
        raise


async def _end_started(starting: asyncio.Task[Process]) -> None:
    with suppress(OSError):  # it did not start
        await _end(await starting)


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


async def _log_lines(name: str, stream: asyncio.StreamReader) -> None:
    async for line in stream:
        logger.warning("%s: %s", name, line.decode(errors="replace").strip())


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)
