"""The difference between what the workers hold at two moments, in two logs, or in a log and a live service."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from indexer.replay import Replay
from kv_events.errors import InvalidValueError
from kv_events.hashing import U64Array
from kv_events.http.log import MovedPage, StreamDiff
from kv_events.schema import MEDIA
from kv_events.streams import StreamId

_TIER_OF_DUMP = {"device": 0, "host_pinned": 1, "disk": 2, "external": 3}


class HeldPages(NamedTuple):
    """The pages that one worker stream holds."""

    hashes: U64Array
    """[n] sequence hashes, ascending."""
    tiers: npt.NDArray[np.uint8]
    """[n] bitmask: bit t = held on tier t."""


Holdings: TypeAlias = Mapping[StreamId, HeldPages]
"""What each worker stream holds."""

NOTHING = HeldPages(np.empty(0, np.uint64), np.empty(0, np.uint8))


def holdings_of(views: Replay) -> Holdings:
    """Return what the views of a replay hold."""
    found = {}
    for view in views.namespaces.views:
        held = view.all_pages()
        found[view.stream] = _sorted(held.hashes, held.tiers)
    return found


def holdings_of_dump(dump: Mapping[str, Any]) -> Holdings:
    """Return what the answer of GET /dump holds. Raises InvalidValueError if it is no such answer."""
    pages: dict[StreamId, dict[int, int]] = {}
    try:
        bases = {name: name.removesuffix(f":{part['block_size']}") for name, part in dump.items()}
        uses = Counter(bases.values())
        for name, part in dump.items():
            model, _, tenant = (bases[name] if uses[bases[name]] > 1 else name).rpartition(":")
            for each in part["events"]:
                event = each["event"]
                stream = StreamId(model, tenant, each["worker_id"], event["dp_rank"])
                held = pages.setdefault(stream, {})
                for block in event["data"]["stored"]["blocks"]:
                    page = block["block_hash"]
                    held[page] = held.get(page, 0) | 1 << _TIER_OF_DUMP[each["storage_tier"]]
    except (AttributeError, KeyError, TypeError) as error:
        raise InvalidValueError("dump", repr(error), "an answer of GET /dump") from error
    return {
        stream: _sorted(np.array(list(held), np.uint64), np.array(list(held.values()), np.uint8))
        for stream, held in pages.items()
    }


def diff(before: Holdings, after: Holdings, num_examples: int = 3) -> list[StreamDiff]:
    """Return the difference of each worker stream of either side, in the order of their names.

    num_examples: at most this many pages of each kind.
    """
    streams = sorted({*before, *after})
    return [_diff(stream, before.get(stream, NOTHING), after.get(stream, NOTHING), num_examples) for stream in streams]


def _diff(stream: StreamId, before: HeldPages, after: HeldPages, num_examples: int) -> StreamDiff:
    _, old, new = np.intersect1d(before.hashes, after.hashes, assume_unique=True, return_indices=True)
    moved = np.flatnonzero(before.tiers[old] != after.tiers[new])
    gained = np.delete(after.hashes, new)
    lost = np.delete(before.hashes, old)
    examples = [
        MovedPage(int(before.hashes[old[i]]), _media(before.tiers[old[i]]), _media(after.tiers[new[i]]))
        for i in moved[:num_examples].tolist()
    ]
    return StreamDiff(
        *stream,
        len(before.hashes),
        len(after.hashes),
        len(gained),
        len(lost),
        len(moved),
        gained[:num_examples].tolist(),
        lost[:num_examples].tolist(),
        examples,
    )


def _sorted(hashes: U64Array, tiers: npt.NDArray[np.uint8]) -> HeldPages:
    order = np.argsort(hashes)
    return HeldPages(hashes[order], tiers[order])


def _media(tiers: np.uint8) -> list[str]:
    return [medium.value for number, medium in enumerate(MEDIA) if int(tiers) >> number & 1]
