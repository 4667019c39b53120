"""Hash namespaces of one worker, and which attention groups allow the reuse of a whole prefix."""

from __future__ import annotations

from bridge.naming.hash_translator import HashNamespace
from publisher.ledger import namespace_salt

FULL_PREFIX_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of attention groups in which a page stands for its whole prefix."""

_MAX_NAMESPACES = 4096


class HashNamespaces:
    """One namespace for each attention group (number, or None if events name none) and each pool owner (text)."""

    def __init__(self) -> None:
        self._namespaces: dict[str | int | None, HashNamespace] = {}
        self._is_full_prefix: dict[int | None, bool] = {}  # by attention group

    def get_or_add(self, key: str | int | None) -> HashNamespace | None:
        """The namespace of a group or owner. None if there are too many."""
        namespace = self._namespaces.get(key)
        if namespace is None and len(self._namespaces) < _MAX_NAMESPACES:
            label = f"group {key}" if isinstance(key, int) else key
            namespace = self._namespaces[key] = HashNamespace(label, len(self._namespaces), namespace_salt(label))
        return namespace

    def get(self, key: str | int | None) -> HashNamespace | None:
        """The namespace of a group or owner. None if nothing was ever stored in it."""
        return self._namespaces.get(key)

    def accepts_stores(self, attention_group: int | None, spec_kind: str) -> bool:
        """Whether a group's stores count. Learns the group's kind if `spec_kind` is not empty."""
        if spec_kind:
            self._is_full_prefix[attention_group] = spec_kind in FULL_PREFIX_KINDS
        return self._is_full_prefix.setdefault(attention_group, True)

    def accepts_removals(self, attention_group: int | None) -> bool | None:
        """Whether a group's removals count. None if nothing was ever stored in it."""
        return self._is_full_prefix.get(attention_group)

    def groups_of_removal(self, attention_group: int | None) -> list[int | None]:
        """The groups that a removal affects. One that names no group removes the hash from every group."""
        return list(self._is_full_prefix) if attention_group is None else [attention_group]
