"""What the reading routes need: the views of now, or those of a moment of the past."""

from __future__ import annotations

from typing import Protocol

from indexer.applier import Applier
from indexer.freshness import Freshness
from indexer.namespaces import Namespaces
from indexer.views import View


class ViewSource(Protocol):
    """The views that a service answers from. A `Consumer` follows a log; a replay shows one moment of it."""

    @property
    def namespaces(self) -> Namespaces:
        """The views."""

    @property
    def freshness(self) -> Freshness:
        """What tells their states."""

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
