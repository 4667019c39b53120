"""What goes wrong in a simulation, beyond bad values."""

from __future__ import annotations

from kv_events.errors import KvsightError


class SimulationError(KvsightError):
    """A part of a live fleet ended, or a view did not catch up in time."""
