"""Errors of a simulation other than invalid values."""

from __future__ import annotations

from kv_events.errors import KvsightError


class SimulationError(KvsightError):
    """A part of a live fleet has ended, or a view did not catch up in time."""
