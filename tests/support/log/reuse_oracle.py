"""The reusable part of a match, computed with sets."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence, Set


def window_pages(group: str, page_size: int) -> int:
    """Return the number of pages that a group needs at the end of a prefix: one for a state, or those of a window."""
    return 1 if group == "mamba" else -(-int(group.removeprefix("swa:")) // page_size)


def num_reusable(
    prompt: Sequence[Hashable], held: Collection[Hashable], groups: Mapping[str, Set[Hashable]], page_size: int
) -> int:
    """Return the pages of the longest held prefix that satisfies every group at its end.

    prompt: its pages. groups: name -> marked pages.
    """
    matched = next((i for i, page in enumerate(prompt) if page not in held), len(prompt))
    return max(
        p
        for p in range(matched + 1)
        if all(set(prompt[max(0, p - window_pages(name, page_size)) : p]) <= marked for name, marked in groups.items())
    )
