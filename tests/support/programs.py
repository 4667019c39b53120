"""Programs of a few lines that run in a Python of their own."""

import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def run_program(program: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run one until it ends, without the settings of the developer. variables: further ones of its environment."""
    theirs = {name: value for name, value in os.environ.items() if not name.startswith(("KVSIGHT_", "OTEL_"))}
    words = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(words, cwd=_ROOT, env=theirs | variables, capture_output=True, text=True, timeout=100)
