"""The views before the oldest record of a log, for tools that read all its records."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from indexer.replay.frames import FRAME_SUFFIX, KeyFrameError, OtherSettingsError, load_frame, read_head
from indexer.replay.replay import Replay
from indexer.settings import IndexerSettings
from kv_events.log.format import list_segments


class Beginning(NamedTuple):
    """The views before the oldest record of a log."""

    views: Replay
    """Empty without a key frame."""
    fault: str = ""
    """Why the key frame could not be used; empty if there is none, or if it is used."""
    warning: str = ""
    """That the views are incomplete, because older records were deleted without a key frame that has all of them."""


def open_beginning(folder: Path, settings: IndexerSettings, *, is_bounded: bool = True) -> Beginning:
    """Return the views before the oldest record of a log: those of the key frame there, or empty ones.

    is_bounded: use only a key frame that was made with these settings. Raises OSError.
    """
    segments = list_segments(folder)
    first = segments[0].first_index if segments else 0
    path = folder / f"{first:020d}{FRAME_SUFFIX}"
    fault = ""
    if path.exists():
        try:
            views = load_frame(read_head(path, settings if is_bounded else None), settings)
            return Beginning(views, warning=begins_late(folder, first) if views.lacks_beginning else "")
        except (KeyFrameError, OtherSettingsError) as error:
            fault = str(error)
    return Beginning(Replay(settings), fault, begins_late(folder, first) if first else "")


def begins_late(folder: Path, first_index: int) -> str:
    """Return the sentence about a log whose oldest records were deleted, without a key frame that has all of them."""
    cause = f"the records before {first_index} are deleted" if first_index else "it is a slice of a log that does"
    return (
        f"{folder} begins late: {cause}, and no key frame has everything that workers held then. "
        "What a worker held is unknown until it resends everything"
    )
