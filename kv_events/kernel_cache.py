"""Caches compiled kernels in a folder that is named after a digest of all sources that may be part of them.

numba itself only checks the file of the entry point. It would use outdated code after a change in another file with
functions that the entry point calls.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from kv_events.numba_internals import cache_dir, cached_in

_IMPORT = re.compile(rb"^\s*(?:from|import)\s+([\w.]+)", re.MULTILINE)


@contextmanager
def kept_on_disk(source: Path) -> Iterator[None]:
    """Cache kernels that a module declares in the block in the folder of the current state of its sources.

    If that folder cannot be created, numba chooses a folder itself or compiles again at each start.
    """
    try:
        folder = _cache_root() / _digest_of_sources(source)
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home folder or no permission
        yield
        return
    with cached_in(folder):
        yield


def _cache_root() -> Path:
    """Return NUMBA_CACHE_DIR or the user's cache folder."""
    named = cache_dir()
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvsight" / "kernels"


@lru_cache
def _digest_of_sources(source: Path) -> str:
    """Return the digest of a module and of all modules of this project that it imports directly or indirectly."""
    found: set[Path] = set()
    waiting = {source}
    while waiting:
        path = waiting.pop()
        found.add(path)
        waiting |= _imported(path) - found
    digest = sha256()
    for path in sorted(found):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@lru_cache
def _imported(source: Path) -> frozenset[Path]:
    """Return the files of this project that a module imports. An imported package counts with all its modules."""
    contract = Path(__file__).parent
    packages = [folder for folder in source.parents if (folder / "__init__.py").exists()]
    own = packages[-1] if packages else source.parent
    found: set[Path] = set()
    for name in set(_IMPORT.findall(source.read_bytes())):
        for root in {own.parent if packages else own, contract.parent}:
            target = root.joinpath(*name.decode().split("."))
            paths = [Path(f"{target}.py")] if Path(f"{target}.py").exists() else target.glob("*.py")
            found.update(
                path for path in paths if {own, contract} & {*path.parents} or b"kv_events" in path.read_bytes()
            )
    return frozenset(found)
