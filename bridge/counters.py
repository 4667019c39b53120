"""What a bridge counts, for status and metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace


@dataclass(slots=True)
class BridgeCounters:
    """Of one engine since it was added. What is left out is left out on purpose: a router must not trust it."""

    batches: int = 0
    events: int = 0
    pages_stored: int = 0
    """Handed to the publisher; what it knew already among them."""
    pages_removed: int = 0
    clears: int = 0
    """By the engine's own word."""

    gaps: int = 0
    """Jumps of the sequence."""
    replays: int = 0
    replayed_batches: int = 0
    failed_replays: int = 0
    duplicate_batches: int = 0
    """Came live, too, after a replay."""
    stale_batches: int = 0
    """Came live from an incarnation that is gone."""
    lost_batches: int = 0
    """Not to be had any more."""
    losses: int = 0
    """Times that all pages were given up because batches were lost."""
    restarts: int = 0
    """Engine incarnations after the first."""
    reconnects: int = 0

    undecodable: int = 0
    """Messages that are no batch."""
    bad_events: Counter[str] = field(default_factory=Counter)
    """Events that cannot be read, by reason; the rest of their batch was taken."""
    bad_ranks: int = 0
    """Batches whose rank makes no sense; taken for the registered one."""
    foreign_ranks: int = 0
    """Batches of a rank that is another engine's, or one too many; left out."""
    unknown_media: Counter[str] = field(default_factory=Counter)
    """Pages on media that nobody knows, by name."""
    guessed_salts: int = 0
    """Stores whose cache salt is only known by the looks of an extra key."""
    unknown_parents: int = 0
    """Stored pages whose prefix is not known."""
    unresolved_pages: int = 0
    """Stored pages that came without tokens and are not known."""
    other_groups: int = 0
    """Pages of attention groups that do not speak for a whole prefix."""
    other_block_sizes: int = 0
    """Pages of another size than the stream's."""
    partial_pages: int = 0
    """Last pages that were not full."""
    foreign_events: int = 0
    """Events of another model or tenant."""
    refused_spaces: int = 0
    """Pages of attention groups or owners beyond the bound."""

    def copy(self) -> BridgeCounters:
        """Figures of this moment."""
        return replace(self, bad_events=Counter(self.bad_events), unknown_media=Counter(self.unknown_media))
