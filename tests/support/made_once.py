"""Parts that all test processes share, made by one of them while the others wait."""

import fcntl
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def made_once(path: Path, make: Callable[[Path], Path]) -> Path:
    """Return a path that exists, made if it does not.

    make: makes the part inside a folder and returns its path. It gets its name when it is complete, so an interrupted
    process leaves nothing behind.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        staging = tempfile.TemporaryDirectory(dir=path.parent, prefix="partial-")
        with locked(path), staging as name:
            if not path.exists():
                make(Path(name)).rename(path)
    return path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes from making the same path during a block. Its folder exists."""
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
