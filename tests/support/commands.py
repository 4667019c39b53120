"""The `kvsight` command, run by tests as a process until it ends."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.prepared_python import run_module

KVSIGHT = [sys.executable, "-m", "kvsight"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("KVSIGHT_")}
"""No settings of the developer."""


def kvsight(
    *arguments: object, stdin: str = "", environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command with pipes. environment: further variables. Raises TimeoutError."""
    return run_module("kvsight", *arguments, stdin=stdin, environment=ENVIRONMENT | (environment or {}))
