"""An engine process with kvsight's publisher, which a test controls line by line.

Usage: `python -m tests.support.engines.publishing_process CLOCK_AHEAD_S`, with the publisher's settings in `KVSIGHT_*`
variables. Each line on stdin is a JSON array, and each one is answered by a line on stdout: `["store", HASHES]`,
`["remove", HASHES]`, `["clock", SECONDS]` sets how far the wall clock of the process is ahead, and `["close",
DEADLINE_S]` closes the publisher and ends the process. SIGTERM closes it, too.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TextIO

import numpy as np

from tests.support.prepared_python import PreparedProcess

MODEL = "m"
BLOCK_SIZE = 4
_STDERR = 2


class PublishingProcess:
    """`with PublishingProcess("w", KVSIGHT_KAFKA=...) as engine:`. Knows the pages that the engine holds."""

    def __init__(self, worker: str, *, clock_ahead_s: float = 0.0, **variables: object) -> None:
        """worker: its name. variables: settings of the publisher."""
        settings = {"KVSIGHT_MODEL": MODEL, "KVSIGHT_WORKER": worker, "KVSIGHT_BLOCK_SIZE": BLOCK_SIZE, **variables}
        self.worker = worker
        self.held: set[int] = set()
        (orders, self._orders), (self._answers, answers) = _pipe(), _pipe()
        with orders, answers:
            streams = orders.fileno(), answers.fileno(), _STDERR
            self._process = PreparedProcess(__name__, [clock_ahead_s], _environment(settings), streams)
        self.epoch: int = self._answer()

    def store(self, *hashes: int) -> None:
        """Store pages on the device."""
        self.held |= set(hashes)
        self._order("store", hashes)

    def remove(self, *hashes: int) -> None:
        """Remove pages."""
        self.held -= set(hashes)
        self._order("remove", hashes)

    def set_clock(self, ahead_s: float) -> None:
        """Set the wall clock of the process to this many seconds ahead."""
        self._order("clock", ahead_s)

    def close(self, deadline_s: float = 5.0) -> float:
        """Close the publisher and wait for the end of the process. Returns the seconds that the close took."""
        return float(self._order("close", deadline_s))

    def pause(self) -> None:
        """Send SIGSTOP: nothing is published until `resume`."""
        self._process.send(signal.SIGSTOP)

    def resume(self) -> None:
        """Send SIGCONT."""
        self._process.send(signal.SIGCONT)

    def terminate(self) -> None:
        """Send SIGTERM and wait for the end."""
        self._process.send(signal.SIGTERM)
        self._process.wait(30)

    def kill(self) -> None:
        """Send SIGKILL. Idempotent."""
        self._process.kill()

    def _order(self, command: str, argument: object) -> Any:
        self._orders.write(json.dumps([command, argument]) + "\n")
        self._orders.flush()
        return self._answer()

    def _answer(self) -> Any:
        return json.loads(self._answers.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
        self._orders.close()
        self._answers.close()


def _pipe() -> tuple[TextIO, TextIO]:
    """Return the reading and the writing end."""
    reader, writer = os.pipe()
    return os.fdopen(reader), os.fdopen(writer, "w")


def _environment(settings: Mapping[str, object]) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("KVSIGHT_")}
    return ours | {name: str(value) for name, value in settings.items()}


def _main(clock_ahead_s: float) -> None:
    clock = _WallClock(clock_ahead_s)
    from kv_events.schema import BlockRemoved, BlockStored
    from publisher import EventPublisher, PublisherSettings
    from publisher.sinks import create_sink

    settings = PublisherSettings(heartbeat_s=0.2)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # leaves the block, as an engine's server does
    with EventPublisher(settings, create_sink(settings)) as publisher:
        _say(publisher.epoch)
        for line in sys.stdin:
            match json.loads(line):
                case ["store", hashes]:
                    words = np.array(hashes, np.uint64).tobytes()
                    publisher.publish([BlockStored(hashes, None, [], BLOCK_SIZE, sequence_hashes=words)])
                case ["remove", hashes]:
                    publisher.publish([BlockRemoved(hashes)])
                case ["clock", ahead_s]:
                    clock.ahead_ns = int(ahead_s * 1e9)
                case ["close", deadline_s]:
                    began = time.monotonic()
                    publisher.close(deadline_s)
                    _say(time.monotonic() - began)
                    os._exit(0)
            _say(None)


class _WallClock:
    """Stands in for the machine's clock, which a test cannot set."""

    def __init__(self, ahead_s: float) -> None:
        self.ahead_ns = int(ahead_s * 1e9)
        right_ns = time.time_ns
        time.time_ns = lambda: right_ns() + self.ahead_ns
        time.time = lambda: time.time_ns() / 1e9


def _say(answer: Sequence[object] | float | None) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _main(float(sys.argv[1]))
