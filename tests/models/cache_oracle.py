"""Brute-force reference for the end of a match and the data that locks hold."""

from typing import NamedTuple


class Page(NamedTuple):
    """The data of one page of a prompt in a tree. The first three fields are sets of tiers, "d" and "h"."""

    full: set[str]
    swa: set[str]
    mamba: set[str]
    """The recurrent state after the page, if the page ends a node."""
    ends_node: bool


def pages_along(rig, tokens, extra_key):
    """Return a `Page` for each leading page of the prompt that is in the tree."""
    found = {}
    for node, namespace, prefixes in rig.walk():
        tiers = {kind: _tiers(rig.data(node, kind)) for kind in ("full", "swa", "mamba")}
        for raw in prefixes:
            is_end = raw == prefixes[-1]
            found[namespace, raw] = Page(tiers["full"], tiers["swa"], tiers["mamba"] if is_end else set(), is_end)
    pages = []
    for raw in rig.prefixes(tokens):
        if (extra_key, raw) not in found:
            break
        pages.append(found[extra_key, raw])
    return pages


def _tiers(data):
    return {name for name, rows in (("d", data.value), ("h", data.host_value)) if rows is not None}


def num_usable(rig, pages, tiers):
    """Return the number of pages of the longest usable prefix on these tiers."""
    return max(n for n in range(len(pages) + 1) if n == 0 or _is_usable(rig, pages, n, tiers))


def _is_usable(rig, pages, num_pages, tiers):
    last = pages[num_pages - 1]
    if not (last.ends_node or num_pages == len(pages)) or not last.full & tiers:
        return False
    if "mamba" in rig.kinds and not last.mamba & tiers:
        return False
    if "swa" in rig.kinds:
        first = max(0, num_pages - -(-rig.window // rig.page_size))
        return all(page.swa & tiers for page in pages[first:num_pages])
    return True


def needed_on_device(rig, node):
    """Return, by kind, the nodes whose device data a lock protects. Windows may contain gaps.

    Locks without tickets cover a node without a state as well.
    """
    is_locked = rig.data(node, "mamba").value is not None or not rig.cache.variant.locks_have_tickets
    needed = {"mamba": [node][:is_locked] if "mamba" in rig.kinds else [], "swa": []}
    covered = 0
    for step in rig.up(node):
        if covered < rig.window and rig.data(step, "swa").value is not None:
            needed["swa"].append(step)
            covered += len(step.key)
    return needed


def states_of_windows(rig, field):
    """Return nodes with both SWA rows and a state on the tier. The state is useless without the rows."""
    nodes = [place.node for place in rig.walk()]
    return [
        node for node in nodes if all(getattr(rig.data(node, kind), field) is not None for kind in ("swa", "mamba"))
    ]


def lost_windows(rig, nodes, field):
    """Return the nodes that have lost their SWA rows on the tier but still have their state there."""
    states = [node for node in nodes if getattr(rig.data(node, "mamba"), field) is not None]
    return [node for node in states if getattr(rig.data(node, "swa"), field) is None]
