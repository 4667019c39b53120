"""`kvsight log verify`"""

from __future__ import annotations

import time
from typing import Any

from kvsight.cli.console import print_json, print_lines
from kvsight.cli.log.reading import LogFolder, LogInput
from kvsight.cli.options import AsJson
from kvsight.cli.tables import count

_MB = 1_000_000


def verify(log: LogFolder, as_json: AsJson = False) -> None:
    """Check every byte of a log: checksums, missing segments, a torn tail, key frames and the time index.

    Damage is listed on stderr with segment, byte and record, and the exit code is 1.

    Example: kvsight log verify run.log
    """
    source = LogInput(log)
    from kv_events.log.time_index import faults_of_times

    began = time.perf_counter()
    for _ in source.chunks("checking"):
        pass
    seconds = time.perf_counter() - began
    source.faults += faults_of_times(log)
    if any(log.glob("*.kvframe")):
        from indexer.replay.frames import faults_of_frames

        source.faults += faults_of_frames(log)
    if as_json:
        print_json(_facts(source))
    else:
        rate = source.num_bytes / _MB / max(seconds, 1e-9)
        sound = count(source.extent.num_records, "sound record")
        print_lines([f"{log}: {sound}, {source.num_bytes / _MB:.1f} MB checked at {rate:.0f} MB/s"])
    source.exit_if_damaged()


def _facts(source: LogInput) -> dict[str, Any]:
    return {
        "records": source.extent.num_records,
        "bytes": source.num_bytes,
        "first_index": source.extent.first_index,
        "next_index": source.extent.next_index,
        **damage_facts(source),
    }


def damage_facts(*sources: LogInput) -> dict[str, Any]:
    """What could not be read of some logs, for `--json`."""
    return {
        "damage": [
            {
                "segment": error.segment.name,
                "byte": error.position,
                "record": error.index,
                "detail": error.detail,
                "next_record": None if error.resume is None else error.resume.record_index,
            }
            for source in sources
            for error in source.damage
        ],
        "torn_tail_bytes": sum(source.tail.num_bytes for source in sources if source.tail is not None),
        "faults": [fault for source in sources for fault in source.faults],
    }
