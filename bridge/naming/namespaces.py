"""What keeps equal hashes of one worker apart, and which of it says that a whole prefix can be reused."""

from __future__ import annotations

from bridge.naming.hash_translator import Space
from publisher.ledger import namespace_salt

FULL_PREFIX_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Attention groups of which a page says that its whole prefix can be reused."""

_MOST_SPACES = 4096


class Spaces:
    """Attention groups (numbers, or None where events name none) and owners of pooled pages (texts)."""

    def __init__(self) -> None:
        self._spaces: dict[str | int | None, Space] = {}
        self._is_full_prefix: dict[int | None, bool] = {}  # by attention group

    def space(self, key: str | int | None) -> Space | None:
        """None: there are too many."""
        space = self._spaces.get(key)
        if space is None and len(self._spaces) < _MOST_SPACES:
            label = f"group {key}" if isinstance(key, int) else key
            space = self._spaces[key] = Space(label, len(self._spaces), namespace_salt(label))
        return space

    def known(self, key: str | int | None) -> Space | None:
        """None: nothing was ever stored there."""
        return self._spaces.get(key)

    def takes_stores(self, group: int | None, spec_kind: str) -> bool:
        """Whether a group's pages count; learns the group's kind, where a store names it."""
        if spec_kind:
            self._is_full_prefix[group] = spec_kind in FULL_PREFIX_KINDS
        return self._is_full_prefix.setdefault(group, True)

    def takes_removals(self, group: int | None) -> bool | None:
        """Whether a group's pages count; None: nothing was ever stored in it."""
        return self._is_full_prefix.get(group)

    def meant_by(self, group: int | None) -> list[int | None]:
        """Groups of a removal. One that names none means the hash in every group."""
        return list(self._is_full_prefix) if group is None else [group]
