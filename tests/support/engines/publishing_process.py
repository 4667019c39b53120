"""An engine process with kvsight's publisher, which a test controls line by line.

Usage: `python -m tests.support.engines.publishing_process CLOCK_AHEAD_S`, with the publisher's settings in `KVSIGHT_*`
variables. Each line on stdin is a JSON array, and each one is answered by a line on stdout: `["store", HASHES]`,
`["remove", HASHES]`, and `["close", DEADLINE_S]`, which closes the publisher and ends the process. SIGTERM closes it,
too.
"""

import json
import os
import signal
import sys
import time

import numpy as np

from tests.support.controlled_process import ControlledProcess, say, set_wall_clock

MODEL = "m"
BLOCK_SIZE = 4


class PublishingProcess(ControlledProcess):
    """`with PublishingProcess("w", KVSIGHT_KAFKA=...) as engine:`. Knows the pages that the engine holds."""

    def __init__(self, worker: str, *, clock_ahead_s: float = 0.0, **variables: object) -> None:
        """worker: its name. variables: settings of the publisher."""
        settings = {"KVSIGHT_MODEL": MODEL, "KVSIGHT_WORKER": worker, "KVSIGHT_BLOCK_SIZE": BLOCK_SIZE, **variables}
        self.worker = worker
        self.held: set[int] = set()
        super().__init__(__name__, [clock_ahead_s], settings)
        self.epoch: int = self.greeting

    def store(self, *hashes: int) -> None:
        """Store pages on the device."""
        self.held |= set(hashes)
        self.order("store", hashes)

    def remove(self, *hashes: int) -> None:
        """Remove pages."""
        self.held -= set(hashes)
        self.order("remove", hashes)

    def close(self, deadline_s: float = 5.0) -> float:
        """Close the publisher and wait for the end of the process. Returns the seconds that the close took."""
        return float(self.order("close", deadline_s))


def _main(clock_ahead_s: float) -> None:
    set_wall_clock(clock_ahead_s)
    from kv_events.schema import BlockRemoved, BlockStored
    from publisher import EventPublisher, PublisherSettings
    from publisher.sinks import create_sink

    settings = PublisherSettings(heartbeat_s=0.2)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # leaves the block, as an engine's server does
    with EventPublisher(settings, create_sink(settings)) as publisher:
        say(publisher.epoch)
        for line in sys.stdin:
            match json.loads(line):
                case ["store", hashes]:
                    words = np.array(hashes, np.uint64).tobytes()
                    publisher.publish([BlockStored(hashes, None, [], BLOCK_SIZE, sequence_hashes=words)])
                case ["remove", hashes]:
                    publisher.publish([BlockRemoved(hashes)])
                case ["close", deadline_s]:
                    began = time.monotonic()
                    publisher.close(deadline_s)
                    say(time.monotonic() - began)
                    os._exit(0)
            say(None)


if __name__ == "__main__":
    _main(float(sys.argv[1]))
