"""Dynamo's mocker replay, in a process of its own.

`python -m benchmarks.peers.replay TRACE REQUESTS WORKERS TTFT_S ITL_S SPEED ...`

Prints a JSON list: one object for each router mode and speed. Needs Dynamo's package on the path.
"""

import gzip
import json
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

MODES = ("round_robin", "kv_router")


def main(
    trace: str, num_requests: int, workers: int, ttft_s: float, itl_s: float, speeds: list[float]
) -> list[dict[str, Any]]:
    """Return the rows of all runs, in the units of `bench_simulation.Row`."""
    core = import_module("dynamo._core")  # only in this process: it is in an environment of its own
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"  # it does not read compressed files
        content = Path(trace).read_bytes()
        lines = (gzip.decompress(content) if trace.endswith(".gz") else content).splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:num_requests]))
        for speed in speeds:
            for mode in MODES:
                found = core.run_mocker_trace_replay(
                    [str(path)],
                    extra_engine_args={"engine": {"num_gpu_blocks": 2**20 // 64, "block_size": 64}},
                    num_workers=workers,
                    router_mode=mode,
                    arrival_speedup_ratio=speed,
                    trace_block_size=512,
                    sla_ttft_ms=ttft_s * 1000,
                    sla_itl_ms=itl_s * 1000,
                ).summary
                rows.append(
                    {
                        "load": speed,
                        "router": f"Dynamo {mode}",
                        "hit": 100 * found["prefix_cache_reused_ratio"],
                        "ttft_p50": found["median_ttft_ms"],
                        "ttft_p99": found["p99_ttft_ms"],
                        "itl_p50": found["median_itl_ms"],
                        "itl_p99": found["p99_itl_ms"],
                        "good": 100 * found["goodput_completed_requests"] / found["num_requests"],
                    }
                )
    return rows


if __name__ == "__main__":
    trace, num_requests, workers, ttft_s, itl_s, *speeds = sys.argv[1:]
    print(
        json.dumps(main(trace, int(num_requests), int(workers), float(ttft_s), float(itl_s), list(map(float, speeds))))
    )
