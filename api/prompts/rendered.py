"""The tokens of a prompt."""

from typing import NamedTuple

import numpy as np

from kv_events.hashing import U32Array
from kv_events.http.queries import MediaSpan


class Rendered(NamedTuple):
    """The tokens that an engine makes of a prompt, or why they are not known."""

    token_ids: U32Array = np.empty(0, np.uint32)
    """uint32[n]."""
    media: tuple[MediaSpan, ...] = ()
    """What they contain besides text."""
    degraded: str = ""
    """Why there are no tokens. Empty: there are."""
