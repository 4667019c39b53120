"""Ctrl-C at any moment of the start of a command that reads Kafka: it ends without a traceback."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.servers.child_process import free_port
from tests.support.servers.service_process import own_topics
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timing("a command must end within a second of Ctrl-C")

_IGNORING = ["/bin/sh", "-c", 'trap "" INT; exec "$@"', "sh"]
_ENDS = {0, 2, 130, -signal.SIGINT}
"""2: the broker is stopped."""
_LATEST_S = 1.5


@pytest.mark.parametrize("count", [2, pytest.param(5, marks=pytest.mark.soak)])
@pytest.mark.parametrize("broker", ["running", "stopped"])
@pytest.mark.parametrize("command", ["tail", "record"])
@pytest.mark.timeout(300)
def test_an_interrupt_at_any_moment_leaves_no_traceback(
    command: str, broker: str, count: int, kafka_bootstrap: str, tmp_path: Path
) -> None:
    address = kafka_bootstrap if broker == "running" else f"127.0.0.1:{free_port()}"
    environment = {**os.environ, **own_topics(kafka_bootstrap), "KVSIGHT_KAFKA": address}
    chance = random.Random(f"{command} {broker}")
    for number in range(count):
        folder = [] if command == "tail" else [str(tmp_path / str(number))]
        delay_s = chance.uniform(0, _LATEST_S)
        code, output = interrupted([command, *folder, "--kafka", address], environment, delay_s)
        case = f"{command} after {delay_s:.3f} s: {code}\n{output}"
        assert code in _ENDS, case
        assert "Traceback" not in output, case
        assert "Unclosed" not in output, case


@pytest.mark.parametrize("command", ["doctor", "doctor --create-topics", "replay", "simulate --requests 10"])
def test_an_interrupt_ends_a_command_that_waits_for_a_broker(command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with started([*command.split(), "--kafka", address], dict(os.environ)) as process:
            connection, _ = silent.accept()  # and never answer
            os.killpg(process.pid, signal.SIGINT)
            output, _ = process.communicate(timeout=60)
            connection.close()
    assert process.returncode == 130, output
    assert "Traceback" not in output, output
    assert "Unclosed" not in output, output


def interrupted(words: list[str], environment: dict[str, str], delay_s: float) -> tuple[int, str]:
    """Interrupt a command some time after it began to handle that. Returns its exit code and output."""
    with started(words, environment) as process:
        wait_until(lambda: has_begun(process.pid), what="the handler")
        time.sleep(delay_s)  # the moment is what this is about
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=100)
    return process.returncode, output


@contextmanager
def started(words: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Start a command in a process group of its own. It ignores interrupts until it handles them."""
    process = subprocess.Popen(
        [*_IGNORING, sys.executable, "-m", "kvsight", *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def has_begun(pid: int) -> bool:
    """Whether a process no longer ignores SIGINT, as the shell makes Python do while it starts."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":\t", 1) for line in lines)
    return fields["Name"] != "sh" and not int(fields["SigIgn"], 16) & 1 << signal.SIGINT - 1
