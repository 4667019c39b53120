"""A process that keeps the key frames and the time index of a log up to date: `python -m indexer.replay`.

Arguments: the folder of the log, and the settings of the views as JSON. `indexer.replay.log_indexer` starts it.
"""

import sys
import time
from pathlib import Path

import msgspec

from indexer.replay.log_indexer import LogIndexer
from indexer.settings import IndexerSettings
from kv_events.errors import KvsightError
from kv_events.runtime.helper_process import become_helper

_PAUSE_S = 1.0


def main() -> None:
    """Index a log until stdin ends."""
    folder, settings = sys.argv[1:]
    become_helper()
    chosen = IndexerSettings.ignoring_environment(**msgspec.json.decode(settings))
    try:
        indexer = LogIndexer(Path(folder), chosen)
        while True:
            indexer.advance()
            time.sleep(_PAUSE_S)
    except (KvsightError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
