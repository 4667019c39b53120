"""What there is to show at one moment."""

from collections.abc import Callable
from dataclasses import dataclass

from api.page.worker_history import WorkerHistory
from api.view_source import Capacity, ViewSource
from api.workers.description import Engines
from indexer.views import View
from kv_events.http.fleet import DecisionFunnel
from kv_events.streams import StreamId
from selection.book import Booked


@dataclass(frozen=True, slots=True, kw_only=True)
class PageState:
    """The views and their history. Everything is read in the event loop that changes them."""

    key: str
    """Answers about scenes with equal keys are shared. The live scene has the key ""."""
    is_past: bool
    can_forget_expired: bool
    """Whether POST /unregister takes expired workers: those of a log that others write."""
    views: ViewSource
    is_resync_requested: Callable[[View], bool]
    next_step: str
    """What to do if there is no worker, as the end of a sentence."""
    engines: Engines
    """Registered engines, which have no view until they are heard."""
    capacity: Capacity
    booked: Callable[[StreamId], Booked]
    """Returns what is reserved on a rank."""
    watch: WorkerHistory
    funnel: Callable[[float, float], DecisionFunnel]
    """Returns the funnel of the hour before a time, in seconds since 1970, with a curve of so many seconds."""
