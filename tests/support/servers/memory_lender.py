"""A process that lends its memory to a Mooncake master until it is killed.

Usage: `python -m tests.support.servers.memory_lender HOST:PORT READY`. The file READY is created when the memory is
available.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from tests.support.servers.mooncake_master import LENT_BYTES, MooncakeAccess


def main(address: str, ready: Path) -> None:
    lender = MooncakeAccess(address).connect(mooncake_segment_bytes=LENT_BYTES)
    ready.touch()
    signal.pause()
    lender.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
