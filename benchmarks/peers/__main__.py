"""All comparisons with peers: `python -m benchmarks.peers [--json FILE]`. Skipped where wrk or the peer is missing."""

from __future__ import annotations

from benchmarks.peers.queries import run
from benchmarks.report import main

main("peers", lambda: list(run()))
