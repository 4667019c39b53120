"""What can be reused of a match, counted by hand over sets."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence, Set


def window_pages(group: str, page_size: int) -> int:
    """Pages before the end of a prefix that a group needs: one with a state, or as many as a window begins in."""
    return 1 if group == "mamba" else -(-int(group.removeprefix("swa:")) // page_size)


def num_reusable(
    prompt: Sequence[Hashable], held: Collection[Hashable], groups: Mapping[str, Set[Hashable]], page_size: int
) -> int:
    """Pages of the longest prefix of what is held whose end suits every group.

    prompt: names of its pages. groups: name -> pages marked.
    """
    matched = next((i for i, page in enumerate(prompt) if page not in held), len(prompt))
    return max(
        p
        for p in range(matched + 1)
        if all(set(prompt[max(0, p - window_pages(name, page_size)) : p]) <= marked for name, marked in groups.items())
    )
