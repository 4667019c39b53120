"""All comparisons with peers: `python -m benchmarks.peers [--json FILE]`. Skipped where the peer or wrk is missing."""

from benchmarks.peers import in_process, ingest, memory, queries
from benchmarks.report import main

main("peers", lambda: [*in_process.run(), *queries.run(), *ingest.run(), *memory.run()])
