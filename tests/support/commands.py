"""The `kvsight` command: in this process, as a process until it ends, and as a service of a log."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from typer.testing import CliRunner, Result

from kvsight.cli.main import app
from tests.support.prepared_python import run_module
from tests.support.servers.child_process import free_port
from tests.support.waiting import wait_until

KVSIGHT = [sys.executable, "-m", "kvsight"]
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith("KVSIGHT_") and name not in ("COLUMNS", "TERM")
} | {"TERM": "dumb", "NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING": "1"}
"""No settings of the developer, and no colours.

Where colorama is installed, as for MkDocs, numba starts it, and it writes `ESC[0m` at the end of a process.
"""


def invoke(*words: object, stdin: str = "") -> Result:
    """Run a command in this process, with pipes of 80 columns. An error of kvsight is its `exception`."""
    return CliRunner().invoke(app, list(map(str, words)), input=stdin, env={"COLUMNS": "80"})


def kvsight(
    *arguments: object, stdin: str = "", environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command with pipes. environment: further variables. Raises TimeoutError."""
    return run_module("kvsight", *arguments, stdin=stdin, environment=ENVIRONMENT | (environment or {}))


@contextmanager
def served_log(log: Path, *flags: object, interrupts: int = 1) -> Iterator[str]:
    """Run `kvsight serve` with a log whose workers never expire. Ctrl-C ends it without a traceback."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    settings = {"KVSIGHT_WORKER_TTL_S": "1000000000000", "KVSIGHT_FORGET_AFTER_S": "1000000000000"}
    words = [*KVSIGHT, "serve", "--port", str(port), "--event-log-dir", str(log), *map(str, flags)]
    process = subprocess.Popen(words, env=ENVIRONMENT | settings, stderr=subprocess.PIPE)

    def ready() -> bool:
        assert process.poll() is None, process.communicate()
        try:
            return httpx.get(f"{url}/ready").status_code == 200
        except httpx.TransportError:
            return False

    wait_until(ready, deadline_s=100, what="kvsight serve to be ready")
    yield url
    for _ in range(interrupts):
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert b"Traceback" not in errors
    assert process.returncode in ((0, 130) if interrupts == 1 else (130, -signal.SIGINT)), errors
