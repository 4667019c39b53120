"""What the reading routes need: the views of now, or those of a moment of the past."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Protocol, TypeAlias

from indexer.applier import Applier
from indexer.freshness import Freshness
from indexer.index import StreamPages
from indexer.namespaces import Namespaces
from indexer.views import View
from kv_events.streams import StreamId

Capacity: TypeAlias = Callable[[StreamId, int], Mapping[str, int]]
"""Returns what is known of the room of a rank, medium -> pages, given its tokens per page."""


class ViewSource(Protocol):
    """The views that a service answers from. A `Consumer` follows a log; a replay shows one moment of it."""

    @property
    def namespaces(self) -> Namespaces:
        """The views."""

    @property
    def freshness(self) -> Freshness:
        """The rules for their states."""

    @property
    def applier(self) -> Applier:
        """What has applied the records, with their counts."""

    @property
    def ready(self) -> bool:
        """Whether everything that is to be applied has been applied."""

    def why_not_ready(self) -> str:
        """Return why views may lack what is in the event log, or "" if they do not."""

    def reason(self, view: View) -> str:
        """Return why a view cannot be fully trusted, or "" if it can."""

    def now(self) -> float:
        """Return the time at which the views are shown, in seconds since 1970."""


async def stream_pages(served: ViewSource, view: View) -> AsyncIterator[StreamPages]:
    """Yield the pages of a stream in slices. Other tasks run after each slice. Ends if the stream is forgotten."""
    if not is_known(served, view):
        return
    for held in view.index.stream_pages(view.number):
        yield held
        await asyncio.sleep(0)
        if not is_known(served, view):
            return


def is_known(served: ViewSource, view: View) -> bool:
    """Return whether a view is still in use. It may have been forgotten while other tasks were running."""
    return served.namespaces.view(view.stream) is view
