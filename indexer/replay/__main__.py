"""A process that keeps the key frames and the time index of a log up to date: `python -m indexer.replay`.

Arguments: the folder of the log, and the settings of the views as JSON. It runs at a low priority until its stdin
ends, which is when its parent closes it, or has died in any way. `indexer.replay.background` starts it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from indexer.replay.log_indexer import LogIndexer
from indexer.settings import IndexerSettings
from kv_events.errors import KvsightError

_NICENESS = 10
_FIRST_TO_GO = "500"
"""Added to what the kernel thinks of this process when memory runs out, of at most 1000."""
_PAUSE_S = 1.0


class _ParentEndedError(Exception):
    """This process is to end."""


def main() -> None:
    """Index a log until stdin ends."""
    folder, settings = sys.argv[1:]
    os.nice(_NICENESS)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_GO)
    for number in (signal.SIGINT, signal.SIGTERM):  # they are for the parent, whose end ends this process
        signal.signal(number, signal.SIG_IGN)
    chosen = IndexerSettings.ignoring_environment(**msgspec.json.decode(settings))
    try:
        indexer = LogIndexer(Path(folder), chosen)
        while True:
            indexer.advance(lambda _: _check_parent(0.0))
            _check_parent(_PAUSE_S)
    except _ParentEndedError:
        return
    except (KvsightError, OSError) as error:
        sys.exit(str(error))


def _check_parent(wait_s: float) -> None:
    if select.select([sys.stdin], [], [], wait_s)[0]:  # the parent writes nothing
        raise _ParentEndedError


if __name__ == "__main__":
    main()
