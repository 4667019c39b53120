"""The wall clock of processes, which a test sets ahead or back at any moment. The machine's own is left alone."""

import importlib.util
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

_LIBRARY = "vendor/libfaketime/src/libfaketime.so.1"
_FOLLOWED_S = 2.0
_READ_AT_EXEC = {
    "FAKETIME_CACHE_DURATION": "0",  # in seconds; the file is read again within the next one
    "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    "FAKETIME_FORCE_MONOTONIC_FIX": "0",  # else a thread that waits for the interpreter lock spins
    "NO_FAKE_STAT": "1",  # the times of files stay true; numba's cache depends on them
}


class SteppedClock(Mapping[str, str]):
    """The environment of the processes that follow this clock: `ServiceProcess(folder, **clock)`."""

    def __init__(self, file: Path) -> None:
        """file: where the clock is kept. Its processes must find it."""
        self._file = file
        self._environment = {"LD_PRELOAD": str(_library()), "FAKETIME_TIMESTAMP_FILE": str(file), **_READ_AT_EXEC}
        self.set(0)

    def step(self, ahead_s: int) -> None:
        """`set`, and wait for as long as processes may take to follow. They do not tell when they have."""
        self.set(ahead_s)
        time.sleep(_FOLLOWED_S)

    def set(self, ahead_s: int) -> None:
        """Set it this many seconds ahead; negative: back. Processes follow within two seconds."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{ahead_s:+d}")
        new.rename(self._file)  # never half a line

    def __getitem__(self, name: str) -> str:
        return self._environment[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._environment)

    def __len__(self) -> int:
        return len(self._environment)


def read_at_exec(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the variables that must be set when a process starts, as a fork comes too late for them."""
    names = ("LD_PRELOAD", *_READ_AT_EXEC)
    return tuple((name, environment[name]) for name in names if name in environment)


def _library() -> Path:
    found = importlib.util.find_spec("libfaketime")
    assert found is not None, "pip install libfaketime"
    assert found.origin is not None
    return Path(found.origin).parent / _LIBRARY
