"""The reusable part of a match, computed with sets: the longest prefix whose end satisfies every group."""

from collections.abc import Collection, Hashable, Mapping, Sequence, Set


def num_reusable(
    prompt: Sequence[Hashable],
    held: Collection[Hashable],
    groups: Mapping[str, Set[Hashable]],
    page_size: int,
    most: int | None = None,
) -> int:
    """Return the pages that can be reused.

    prompt: its pages. groups: name -> marked pages. most: pages that end before the prompt's last token.
    """
    matched = next((i for i, page in enumerate(prompt) if page not in held), len(prompt))
    if "nofull" in groups:
        matched = len(prompt)
    if groups and most is not None and not ("eagle" in groups and _has_pages(groups)):
        matched = min(matched, most)
    matched = max(0, matched - ("eagle" in groups))
    if groups and most is not None:
        matched = min(matched, most)
    is_eagle = "eagle" in groups
    return max(
        pages
        for pages in range(matched + 1)
        if all(_allows(name, marked, prompt, pages, page_size, is_eagle) for name, marked in groups.items())
    )


def _has_pages(groups: Mapping[str, Set[Hashable]]) -> bool:
    return any(name.startswith(("swa", "mamba", "chunk")) for name in groups)


def _allows(
    name: str, marked: Set[Hashable], prompt: Sequence[Hashable], end: int, page_size: int, is_eagle: bool
) -> bool:
    """Return whether a group allows a prefix of `end` pages."""
    kind, _, sizes = name.partition(":")
    size, _, block_size = sizes.partition("/")
    if kind in ("eagle", "nofull") or end == 0:
        return True
    if kind == "step":
        return end * page_size % int(size) == 0
    if kind == "chunk":
        first = end * page_size // int(size) * int(size) // page_size
        return set(prompt[first:end]) <= marked
    if kind == "mamba":
        return prompt[end - 1] in marked
    block = int(block_size or page_size) // page_size
    num_blocks = -(-int(size) // (block * page_size))
    ends = range(end + block * is_eagle, max(0, end - num_blocks * block), -block)
    return all(last <= len(prompt) and prompt[last - 1] in marked for last in ends)
