"""A command compiles all its kernels in one step: at the beginning, on all cores."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import sys
from kv_events.kernels.load import declared_kernels
from kvsight.cli.console import import_without_kernels
first, later = (words.split(",") for words in sys.argv[1:])
import_without_kernels(*first)
print(*(kernel.source for kernel in declared_kernels(tuple(later))))
"""


@pytest.mark.parametrize(
    ("first", "later"),
    [
        ("api.app", "api.server,indexer.assembly,api.queries.parsing,api.fast.local_answers"),
        ("indexer.replay,api.queries.encoding", "indexer.replay,indexer.sources.kafka"),
        (
            "indexer.replay,api.queries.encoding,api.fast.local_answers,api.queries.parsing",
            "indexer.replay,api.queries.body_formats",
        ),
        ("simulation,publisher.own_blocks", "simulation.live,publisher.sinks.kafka,publisher.sinks.memory"),
        ("bridge", "bridge.metrics,publisher.sinks.kafka"),
        (
            "publisher.own_blocks,bridge,indexer.replay,api.app",
            "simulation,engine_cache,bridge.plugins,indexer.replay,api.server",
        ),
    ],
    ids=["serve", "replay", "replay --query", "simulate", "bridge", "compile-kernels"],
)
def test_no_kernel_is_declared_after_the_first_import(first: str, later: str) -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM, first, later], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr + done.stdout
