"""The `kvsight` processes of one deployment, and what people see of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.support.servers.child_process import ChildProcess, free_port
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534
"""A user without a name, a home folder or write access, as in containers on OpenShift."""

KVSIGHT = [sys.executable, "-m", "kvsight"]


class Site:
    """The environment of all processes, and the folder for their output."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self._environment = {"PYTHONPATH": str(ROOT), "COLUMNS": "80", **environment}
        self._processes: list[ChildProcess] = []

    def run(self, *words: object, rc: int = 0) -> str:
        """Run a `kvsight` command to its end and return stdout. rc: the expected exit status."""
        done = subprocess.run(
            [*KVSIGHT, *map(str, words)],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=self.folder,
            env={**os.environ, **self._environment},
        )
        assert done.returncode == rc, f"kvsight {' '.join(map(str, words))}\n{done.stdout}{done.stderr}"
        return done.stdout

    def start(self, name: str, *words: object, user: int | None = None, **variables: object) -> Running:
        """Start a `kvsight` service. user: number of the user and group that it runs as."""
        command: list[str | Path] = [*KVSIGHT, *map(str, words)]
        if user is not None:
            command = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *command]
        running = Running(command, self.folder / f"{name}.log", {**self._environment, **_texts(variables)})
        self._processes.append(running)
        return running

    def close(self) -> None:
        """Kill whatever still runs."""
        for process in self._processes:
            process.kill()


class Running(ChildProcess):
    """A service of the site."""

    def __init__(self, command: Sequence[str | Path], log: Path, env: Mapping[str, str]) -> None:
        super().__init__(command, log, env)
        self._log_file = log

    def terminate(self) -> None:
        """Send SIGTERM to the service alone and wait for its end."""
        self.send(signal.SIGTERM)
        wait_until(lambda: not self.running, deadline_s=30, what="the service to end")

    @property
    def output(self) -> str:
        """All that the service has written to stdout and stderr."""
        return self._log_file.read_text(errors="replace")

    def wait_for(self, *words: str, deadline_s: float = 60) -> str:
        """Return the first line of the output that contains all the words, as soon as there is one."""
        found: list[str] = []

        def is_there() -> bool:
            found[:] = [line for line in self.output.splitlines() if all(word in line for word in words)]
            return bool(found)

        wait_until(is_there, deadline_s, f"a line with {words} in:\n{self.output}")
        return found[0]

    def count(self, *words: str) -> int:
        """Return the number of lines that contain all the words."""
        return sum(all(word in line for word in words) for line in self.output.splitlines())


class Api:
    """The service, as a router and an operator see it."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._http = httpx.Client(base_url=self.url, timeout=30)

    def ready(self) -> tuple[int, str]:
        """Return the status and the text of GET /ready."""
        answer = self._http.get("/ready")
        return answer.status_code, answer.text

    def is_up(self) -> bool:
        """Return whether the service listens."""
        try:
            return self._http.get("/health").is_success
        except httpx.TransportError:
            return False

    def states(self) -> dict[str, str]:
        """Return worker -> state, from GET /workers."""
        return {each["instance_id"]: each["state"] for each in self.workers()}

    def workers(self) -> list[dict[str, Any]]:
        """Return GET /workers."""
        return self._http.get("/workers").json()  # type: ignore[no-any-return]

    def query(self, body: object) -> dict[str, int]:
        """Return worker -> tokens that it holds."""
        answer = self._http.post("/query", json=body)
        assert answer.is_success, answer.text
        return {worker: held["longest_matched"] for worker, held in answer.json()["instances"].items()}

    def metric(self, name: str) -> float:
        """Return the value of a metric without labels."""
        lines = self._http.get("/metrics").text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))

    def close(self) -> None:
        self._http.close()


def _texts(variables: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in variables.items()}
