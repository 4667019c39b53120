"""Reads the pages of a worker stream in slices. The views may change between two slices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from api.served_views import ViewSource
from indexer.index import StreamPages
from indexer.views import View

_LONGEST_CHAIN_BITS = 32


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
