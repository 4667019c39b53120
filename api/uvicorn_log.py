"""uvicorn's log, in which no client can repeat a line without end."""

from __future__ import annotations

import logging
from typing import Any

from kv_events.rate_limited_logger import RateLimitedLogger

_UVICORN = logging.getLogger("uvicorn.error")


class UvicornLog(logging.Logger):
    """The log of connections. What uvicorn warns of is a client's fault, such as a malformed request."""

    def __init__(self) -> None:
        super().__init__(_UVICORN.name)
        self.parent = _UVICORN
        self._limited_logger = RateLimitedLogger(_UVICORN, "http")

    def warning(self, msg: object, *args: object, **_options: Any) -> None:
        """Log a warning at most twice a minute."""
        self._limited_logger.warning(str(msg), *args)
