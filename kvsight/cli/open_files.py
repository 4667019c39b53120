"""The limit on open files of long-running commands."""

from __future__ import annotations

import contextlib
import logging
import resource
import sys

logger = logging.getLogger(__name__)

_OWN_FILES = 128
"""More than a process needs without callers and engines: for logs, snapshots, Kafka, Redis."""


def allow_open_files(connections: int, engines: int = 0) -> int:
    """Let the process open as many files as the system permits. Logs if it may need more.

    connections, engines: files that they may need. Returns how many the engines may use: at least half of all.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # not every system raises it that far
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = sys.maxsize if limit == resource.RLIM_INFINITY else limit
    needed = _OWN_FILES + connections + engines
    if limit < needed:
        advice = "raise the hard limit (LimitNOFILE=, ulimit -Hn) or lower the bounds"
        logger.warning("%d files may be open, but %d may be needed: %s", limit, needed, advice)
    return max(limit - connections - _OWN_FILES, limit // 2)
