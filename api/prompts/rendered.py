"""The tokens of a prompt, and the cache of those that were made lately."""

import time
from typing import NamedTuple

import numpy as np

from kv_events.hashing import U32Array
from kv_events.http.queries import MediaSpan

_MAX_CACHED = 256
_MAX_CACHED_TOKENS = 2**16
_MAX_AGE_S = 60.0  # chat templates may contain the date


class Rendered(NamedTuple):
    """The tokens that an engine makes of a prompt, or why they are not known."""

    token_ids: U32Array = np.empty(0, np.uint32)
    """uint32[n]."""
    media: tuple[MediaSpan, ...] = ()
    """What they contain besides text."""
    degraded: str = ""
    """Why there are no tokens. Empty: there are."""


class RenderedCache:
    """Keeps the tokens of whole bodies for a minute: the newest 256 prompts of at most 65,536 tokens.

    The tokens of one body say nothing of another body that begins alike: a chat template may look at all messages
    before it writes the first, and a tokenizer merges across the border of two texts.
    """

    def __init__(self) -> None:
        self._kept: dict[bytes, tuple[float, Rendered]] = {}  # key -> end of its time; the oldest first

    def get(self, key: bytes) -> Rendered | None:
        """Return what is kept under a key."""
        until, found = self._kept.get(key, (0.0, None))
        return found if time.monotonic() < until else None

    def put(self, key: bytes, rendered: Rendered) -> None:
        """Keep it, and drop the oldest one if there is no room."""
        if len(rendered.token_ids) <= _MAX_CACHED_TOKENS:
            self._kept.pop(key, None)
            self._kept[key] = time.monotonic() + _MAX_AGE_S, rendered
        if len(self._kept) > _MAX_CACHED:
            del self._kept[next(iter(self._kept))]
