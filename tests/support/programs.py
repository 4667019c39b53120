"""Programs of a few lines that run in a Python of their own."""

import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def own_environment(**variables: object) -> dict[str, str]:
    """The environment of the tests without the settings of the developer, and with further variables."""
    theirs = {name: value for name, value in os.environ.items() if not name.startswith(("KVSIGHT_", "OTEL_"))}
    return theirs | {name: str(value) for name, value in variables.items()}


def run_program(program: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run one until it ends, without the settings of the developer. variables: further ones of its environment."""
    environment = own_environment(**variables)
    words = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(words, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=100)
