"""What there is to show at one moment."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from api.page.funnel import FunnelWindow
from api.page.watch import FleetWatch
from api.worker_list import Engines
from indexer.freshness import Freshness
from indexer.namespaces import Namespaces
from indexer.views import View


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The views and their history. Everything is read in the event loop that changes them."""

    key: str
    """Answers about scenes with equal keys are shared. The live scene has the key ""."""
    now: float
    """Seconds since 1970."""
    is_past: bool
    namespaces: Namespaces
    freshness: Freshness
    reason: Callable[[View], str]
    """Why a view cannot be fully trusted, or ""."""
    is_resync_requested: Callable[[View], bool]
    why_not_ready: str
    """Why views may lack what is in the log, or ""."""
    engines: Engines
    """Registered engines, which have no view until they are heard."""
    watch: FleetWatch
    funnel: FunnelWindow


OpenScene: TypeAlias = Callable[[str | None], Awaitable[Scene]]
"""Returns the scene of a moment, the text of `?at=`, or of None, which is now. Raises ProblemError for a bad moment."""
