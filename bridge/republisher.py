"""An engine's batches, sent on to routers that keep an index of their own.

Such readers hash the tokens of events and know no degraded reasons. They get all batches in order, with the events as
complete maps. Where the bridge drops pages, because batches are lost or the engine restarted, they get a clear.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from bridge.decoding.decoder import Messages
from bridge.decoding.events import MASK64
from bridge.settings import EngineSettings
from kv_events.errors import KvsightError
from publisher.sinks.base import SinkUnavailableError
from publisher.sinks.zmq_socket import EventSocket, KeptBatches, ReplaySocket

_MAX_KEPT = 1_000_000
_MAX_BYTES = 4 * 2**20
"""Larger batches count as a clear: as Python's objects they need up to 70 times the memory."""
_REPLAYED_BYTES = 2**16
"""Size of a large batch of an engine."""
_RECONNECT_S = 1.0
"""Readers of an earlier process reconnect within this time. They must not miss that the numbers begin again."""
_BEAT_S = 2.0
"""Pause after which the newest batch is sent again. A reader that came late asks for earlier ones when it gets it."""
_Hash = int | bytes
_CLEARED = msgspec.msgpack.encode([0.0, [{"type": "AllBlocksCleared"}], None])
_UNREADABLE = (msgspec.MsgspecError, RecursionError, LookupError, TypeError, ValueError, AttributeError)


class RepublishError(KvsightError):
    """Events cannot be sent on now: an address is in use."""


class _Checked(msgspec.Struct, kw_only=True):
    """What readers understand. They leave out a whole batch for one invalid field."""

    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None = None
    token_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]] = []
    block_size: Annotated[int, msgspec.Meta(ge=0, lt=2**32)] = 0
    lora_id: int | None = None
    medium: str | None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: Annotated[int, msgspec.Meta(ge=0, lt=2**32)] | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: Annotated[int, msgspec.Meta(ge=0, lt=2**32)] | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


_NAMES = _Checked.__struct_fields__
_STORED = _NAMES[: _NAMES.index("locality")]  # the others are only in maps
_FIELDS = {"BlockStored": _STORED, "BlockRemoved": ("block_hashes", "medium", "group_idx"), "AllBlocksCleared": ()}
"""The fields of events that are arrays, in order."""
_REQUIRED = {"BlockStored": _STORED[: _STORED.index("extra_keys")], "BlockRemoved": ("block_hashes", "medium")}
"""Fields that readers may require although engines leave them out: null."""


class Republisher:
    """Sends the batches of one rank on. The numbers begin at 0 for each object, with a clear.

    A clear stands for batches that are no longer kept for replay.
    """

    def __init__(self, endpoint: str, replay_endpoint: str | None) -> None:
        kept, replay = KeptBatches(_MAX_KEPT, _CLEARED), None
        if replay_endpoint is not None:
            replay = ReplaySocket(replay_endpoint, kept, "", "new", _REPLAYED_BYTES)
        self._socket = EventSocket(endpoint, "", kept, replay, binds=True)
        self._waiting = deque([_CLEARED])
        self._is_sending = self._is_quiet = False
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Open the sockets. Raises SinkUnavailableError."""
        await self._socket.start()
        self._timer = asyncio.get_running_loop().call_later(_RECONNECT_S, self._beat)

    def take(self, messages: Messages) -> None:
        """Take the next batches, on any thread. An unreadable one counts as a clear: it may have removed pages."""
        for number in range(len(messages)):
            try:
                self._waiting.append(complete_batch(messages.one(number)[1]))
            except _UNREADABLE:
                self._waiting.append(_CLEARED)

    def clear(self) -> None:
        """Note that readers must drop all pages. On any thread."""
        self._waiting.append(_CLEARED)

    def flush(self) -> None:
        """Send what was taken, on the event loop."""
        while self._is_sending and self._waiting:
            self._socket.send(self._waiting.popleft())
            self._is_quiet = False

    async def stop(self) -> None:
        """Send what was taken, and close. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._is_sending = None, True
        self.flush()
        self._is_sending = False
        await self._socket.stop()

    def _beat(self) -> None:
        """Begin to send, and then send the newest batch again if no other was sent since the last beat."""
        if self._is_sending and self._is_quiet:
            self._socket.send_again()
        self._is_sending = True
        self.flush()
        self._is_quiet = True
        self._timer = asyncio.get_running_loop().call_later(_BEAT_S, self._beat)


async def started_republishers(ranks: Sequence[EngineSettings]) -> list[Republisher | None]:
    """Start those of ranks whose events are sent on. Raises RepublishError if one cannot; none is then open."""
    started: list[Republisher | None] = []
    for rank in ranks:
        republisher = Republisher(rank.republish, rank.republish_replay) if rank.republish else None
        try:
            if republisher is not None:
                await republisher.start()
        except SinkUnavailableError as error:
            await asyncio.gather(*(each.stop() for each in started if each is not None))
            raise RepublishError(f"engine {rank.worker} rank {rank.dp_rank}: republish: {error}") from error
        started.append(republisher)
    return started


def complete_batch(payload: bytes | memoryview) -> bytes:
    """Return a batch of vLLM's events as `[time, events, null]`, with the events as complete maps.

    Hashes become unsigned 64-bit integers, as vLLM folds them. The rank is left out, because the address names it.
    Raises one of several errors if a reader would not understand the whole batch.
    """
    if len(payload) > _MAX_BYTES:
        raise ValueError(f"{len(payload)} bytes")
    batch = msgspec.msgpack.decode(payload)
    if isinstance(batch, dict):
        batch = [batch["ts"], batch["events"]]
    time, events = msgspec.convert(batch[:2], tuple[float, list[list[Any] | dict[str, Any]]])
    return msgspec.msgpack.encode([time, list(map(_complete, events)), None])


def _complete(event: list[Any] | dict[str, Any]) -> dict[str, Any]:
    if isinstance(event, list):
        named = dict(zip(_FIELDS[event[0]], event[1:], strict=False))
        salt = named.get("lora_name")
        more = salt if isinstance(salt, dict) else {}  # some SGLang builds have a map with the salt at this position
        event = {"type": event[0]} | named | ({"lora_name": None} | more if more else {})
    if "block_hashes" not in _FIELDS[event["type"]]:
        return event
    complete: dict[str, Any] = dict.fromkeys(_REQUIRED[event["type"]]) | event
    checked = msgspec.convert(complete, _Checked)
    complete["block_hashes"] = list(map(_folded, checked.block_hashes))
    if checked.parent_block_hash is not None:
        complete["parent_block_hash"] = _folded(checked.parent_block_hash)
    return complete


def _folded(block_hash: _Hash) -> int:
    return int.from_bytes(block_hash[-8:], "big") if isinstance(block_hash, bytes) else block_hash & MASK64
