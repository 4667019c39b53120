"""Files that are replaced at once: a reader finds the old content or the new one, never a part of it."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, pieces: Iterable[bytes | bytearray | memoryview], *, sync: bool = False) -> None:
    """Replace a file at once, or leave it as it is. Raises OSError.

    sync: the content is on disk before the file has it.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            file.writelines(pieces)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError:
        with suppress(OSError):  # for example of a read-only disk
            unfinished.unlink(missing_ok=True)
        raise


def delete_unfinished(folder: Path, suffix: str) -> None:
    """Delete what processes that have ended left of `replace_file`. suffix: of the files."""
    # the number of this process may be that of one that ended, as in a container
    for path in folder.glob(f"*{suffix}.*"):
        owner = path.name.rpartition(".")[2]
        if owner.isdecimal() and (int(owner) == os.getpid() or not _is_running(int(owner))):
            with suppress(OSError):
                path.unlink()


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it belongs to another user
        return True
    return True
