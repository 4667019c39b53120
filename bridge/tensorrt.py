"""TensorRT-LLM's polled events (`LLM.get_kv_cache_events()`) -> runs, which are then translated like any engine's.

Polling happens in the engine's own process: pass the events to `PolledEvents`. An engine that publishes over ZMQ uses
vLLM's protocol instead, and a `Fleet` reads it.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from bridge.context import BridgeCounters, EngineContext
from bridge.decoding.events import MASK64, AttentionSpec, InvalidEvent, PageRun, Run
from bridge.decoding.kernels.columns import REMOVAL
from bridge.settings import EngineDefaults
from bridge.worker_stream import EngineState, WorkerStream
from kv_events.hashing import U64Array
from kv_events.runtime.outages import RateLimitedLogger
from kv_events.schema import CLOSED
from publisher.kernels.blocks import BlockTable
from publisher.kernels.events import PageEvents
from publisher.publisher import EventPublisher
from publisher.settings import PublisherSettings

logger = logging.getLogger(__name__)

_TIERS = (0, 1)
"""By cache level."""
_STATES = -1
"""The `window_size` of recurrent states."""


def from_tensorrt(event: Mapping[str, Any], block_size: int, widest_window: int = 0) -> list[Run]:
    """Convert a polled event to runs. Unknown fields are ignored; an invalid event becomes an InvalidEvent.

    block_size: the engine's `tokens_per_block`, which events do not name. widest_window: see `widest_window_of`; layers
    with this window, or with none, have full attention. So have all others of the first cache manager, which names no
    `layer_group_id`: it reuses only a prefix that all windows hold without a gap.
    """
    try:
        return list(_runs(event, block_size, widest_window))
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError):
        return [InvalidEvent("type", may_remove=not _is_store(event))]


def widest_window_of(events: Iterable[Mapping[str, Any]], known: int = 0) -> int:
    """Largest attention window that events name, or `known` if that is larger.

    The engine names all windows in `created` events before it stores the first page.
    """
    windows = (event.get("window_size") for event in events if isinstance(event, Mapping))
    return max(known, *(window for window in windows if isinstance(window, int)), 0)


class PolledEvents:
    """Publishes the events of one engine. Each attention DP rank is a worker stream."""

    def __init__(
        self,
        settings: PublisherSettings,
        make_publisher: Callable[[PublisherSettings, BlockTable | None], EventPublisher],
        *,
        name_pages: int = 4_000_000,
    ) -> None:
        """settings: those of rank 0. make_publisher: called for each rank, and for each of its group streams, with the
        settings and the table of blocks; makes a publisher for exclusive use. name_pages: most former pages to remember
        for each rank.
        """
        self.counters = BridgeCounters()
        self._settings = settings
        self._make_publisher = make_publisher
        self._name_pages = name_pages
        self._widest_window = 0
        self._streams: dict[int, WorkerStream] = {}  # by rank
        self._last_ids: dict[int, int] = {}

    def take(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Publish polled events, in order. Never waits, never raises.

        A gap in the event numbers means that events fell out of the engine's buffer. They may have removed pages, so
        all pages of the rank are dropped, and its views are degraded until the engine clears its cache. Invalid events
        have the same effect, unless they are stores.
        """
        self._widest_window = widest_window_of(events, self._widest_window)
        for event in events:
            try:
                self._take(event)
            except Exception:
                logger.exception("an event of TensorRT-LLM is left out")
                self.counters.bad_events["error"] += 1
                for stream in self._streams.values():
                    stream.drop_all_pages()
        for stream in self._streams.values():
            for _ in stream.end_batch():
                pass
            _, retired = stream.take_publishers()
            for publisher in retired:
                publisher.set_degraded_reason(CLOSED)

    def _take(self, event: Mapping[str, Any]) -> None:
        rank = _integer(event.get("attention_dp_rank") or 0)
        if rank not in self._streams:
            self._streams[rank] = self._new_stream(rank)
        stream, number, last = self._streams[rank], event.get("event_id"), self._last_ids.get(rank)
        if isinstance(number, int):
            if last is not None and number != last + 1:
                self.counters.losses += 1
                for _ in stream.end_batch():  # the pages go, but not their hashes
                    pass
                stream.drop_all_pages()
            self._last_ids[rank] = number
        self.counters.events += 1
        for run in from_tensorrt(event, self._settings.block_size, self._widest_window):
            stream.apply(run)

    def _new_stream(self, rank: int) -> WorkerStream:
        settings = PublisherSettings(**{**self._settings.model_dump(), "dp_rank": rank})
        context = EngineContext(
            EngineDefaults(block_size=settings.block_size, count_copies=False),
            self.counters,
            RateLimitedLogger(logger, f"engine {settings.stream.key}"),
            lambda stream, _, blocks: self._make_publisher(settings.model_copy(update=stream._asdict()), blocks),
            settings.ledger_pages,
            self._name_pages,
        )
        return WorkerStream(settings.stream, context, EngineState(is_receiving=True))


def _runs(event: Mapping[str, Any], block_size: int, widest_window: int) -> Iterator[Run]:
    data, window, layers = event["data"], event.get("window_size"), event.get("layer_group_id")
    attention_group = window if layers is None else _integer(layers)
    spec = AttentionSpec("full_attention")
    if window == _STATES:
        spec = AttentionSpec("mamba")
    elif window is not None and _integer(window) < widest_window and layers is not None:
        spec = AttentionSpec("sliding_window", window)
    match data["type"]:
        case "stored":
            yield from _stored(data, block_size, attention_group, spec)
        case "removed":
            hashes = _hashes(data["block_hashes"])
            for tier in _TIERS:  # the event does not name the level
                yield _removed(hashes, tier, attention_group)
        case "updated":
            yield from _moved(data, block_size, attention_group, spec)
        case "created":
            pass
        case _:
            yield InvalidEvent("tag")


def _is_store(event: Mapping[str, Any]) -> bool:
    data = event.get("data") if isinstance(event, Mapping) else None
    return isinstance(data, Mapping) and data.get("type") == "stored"


def _stored(
    data: Mapping[str, Any], block_size: int, attention_group: int | None, spec: AttentionSpec
) -> Iterator[Run]:
    """A chain of pages: one run for each cache level in turn."""
    parent = None if data.get("parent_hash") is None else _hash(data["parent_hash"])
    for level, stretch in groupby(data["blocks"], lambda block: block.get("cache_level") or 0):
        blocks = list(stretch)
        tokens = [token for block in blocks for token in block["tokens"]]
        hashes = _hashes([block["block_hash"] for block in blocks])
        extra = [_extra_keys(block) for block in blocks]
        tier = _TIERS[_integer(level)]
        yield PageRun(
            PageEvents.one(hashes, tier, parent),
            tier,
            attention_group,
            tokens=np.array([token["token_id"] for token in tokens], np.uint32),
            num_positions=len(tokens),
            block_size=block_size,
            spec=spec,
            extra_keys=extra if any(extra) else (),
        )
        parent = int(hashes[-1])


def _moved(data: Mapping[str, Any], block_size: int, attention_group: int | None, spec: AttentionSpec) -> Iterator[Run]:
    """A move between cache levels. An update of the priority alone moves nothing."""
    levels = data.get("cache_level")
    if levels is None:
        return
    hashes = _hashes([data["block_hash"]])
    old, new = (_TIERS[_integer(levels[side])] for side in ("old_value", "new_value"))
    yield PageRun(PageEvents.one(hashes, new), new, attention_group, block_size=block_size, spec=spec)
    yield _removed(hashes, old, attention_group)


def _removed(hashes: U64Array, tier: int, attention_group: int | None) -> PageRun:
    return PageRun(PageEvents.one(hashes, REMOVAL + tier), tier, attention_group, is_removal=True)


def _extra_keys(block: Mapping[str, Any]) -> list[Any]:
    """What went into a page's hash besides tokens, in vLLM's form; see `bridge.hashes.page_namer`."""
    numbers = {token.get("token_extra_id") or 0 for token in block["tokens"]} - {0}
    keys = [{"token_extra_id": number} for number in sorted(numbers)]
    objects: Sequence[Any] = block.get("mm_keys") or ()
    return keys + [[key["hash"]] if isinstance(key, Mapping) and "hash" in key else [key] for key in objects]


def _hashes(values: Sequence[Any]) -> U64Array:
    return np.array([_hash(value) for value in values], np.uint64)


def _hash(value: Any) -> int:
    """A block hash as 64 bits. Of a longer one, in bytes or hex digits, the last 64 bits."""
    if isinstance(value, str):
        value = bytes.fromhex(value)
    if isinstance(value, bytes) and value:
        return int.from_bytes(value[-8:], "big")
    if not isinstance(value, int):
        raise TypeError(f"got {value!r}, expected a block hash")
    return value & MASK64


def _integer(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"got {value!r}, expected an integer of at least 0")
    return value
