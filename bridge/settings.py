"""Settings of a bridge, and the list of engines that it reads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from pydantic import Field

from kv_events.engine_wire import endpoint_of_rank, has_wildcard
from kv_events.errors import InvalidValueError, check_utf8, without_user
from kv_events.limits import MAX_BLOCK_SIZE, MAX_DP_RANK, MAX_NAME_BYTES, MAX_RANKS, SOCKET_FILES, URL_PATTERN
from kv_events.runtime.settings import KvsightSettings
from kv_events.runtime.words import count, nearest
from kv_events.schema import TIERS
from kv_events.streams import DEFAULT_TENANT, MAX_GROUP_SIZE

_MAX_CONFIG_BYTES = 4 * 2**20
_METRICS_URL = re.compile(
    r"http://(?:[A-Za-z0-9][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?(?:/[A-Za-z0-9_.~-]+)*/metrics"
)
_HOST_PORT = re.compile(r"[A-Za-z0-9*_.-]+:[0-9]+")
_FAULT = re.compile(r"(.*?)(?: - at `\$\.?(.*)`)?", re.DOTALL)  # what msgspec says, and where
_STEP = re.compile(r"\[(\d+)\]|(\w+)")
_TYPES = {"int": "an integer", "bool": "true or false", "str": "text", "array": "a list", "object": "a table"}
_SCHEMES = ("tcp", "ipc", "inproc")
_SHORT = {"replay": "replay_endpoint", "ranks": "num_ranks"}  # names in a flag -> fields
_ADDRESSES = ("endpoint", "replay_endpoint", "republish", "republish_replay")
"""Fields whose ports count up with the ranks."""


class BridgeSettings(KvsightSettings):
    """How a bridge treats its engines. The publishers' settings apply as everywhere."""

    bridge_away_s: float = Field(default=30.0, gt=0)
    """Time after which the pages of an unreachable engine are dropped, and a worker that named itself is forgotten."""

    bridge_name_pages: int = Field(4_000_000, ge=1024, le=2**30)
    """Bound, for each stream, on remembered hashes of pages that the worker no longer holds. As many are kept as the
    worker ever held at a time, at least 65,536.
    """
    bridge_replay_timeout_s: float = Field(5.0, gt=0)
    """Silence after which a replay request is abandoned."""
    bridge_idle_check_s: float = Field(5.0, gt=0)
    """Silence after which an engine with a replay socket is asked for its newest batch."""
    bridge_max_workers: int = Field(1024, ge=1)
    """Bound on workers that may name themselves by their topics on one address."""


class EngineDefaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of an engine besides its events."""

    block_size: int | None = None
    """Tokens a page. None to learn it from the first store."""
    lora_name: str = ""
    """Adapter of pages whose events name none."""
    cache_salt: str = ""
    """Salt of pages whose events name none."""
    eagle: bool = False
    """Whether the engine speculates with EAGLE or MTP. It then computes one more block of every prompt."""
    count_copies: bool = True
    """Whether a repeated store is one more copy of the block, so that the page is held until all copies are removed.
    False for vLLM where requests ask for `kv_cache_report_mode: full`: it then repeats stores of blocks that it has."""
    attention_chunk_size: int | None = None
    """Tokens of a chunk of chunked local attention, which vLLM's events do not name."""


class EngineSettings(EngineDefaults, frozen=True, kw_only=True):
    """One engine with all or some of its DP ranks. Raises InvalidValueError naming the field."""

    endpoint: str
    """Address of the first rank's events: `tcp://HOST:PORT`. If the host is a wildcard, we bind it and the engine
    connects."""
    worker: str | None = None
    """None if workers name themselves by topics of the form `kv@<worker>@<model>`."""
    model: str | None = None
    """None if topics name it."""
    replay_endpoint: str | None = None
    """None if there is no replay socket. Missed batches are then lost, and all pages of the engine are dropped."""
    tenant: str = DEFAULT_TENANT
    dp_rank: int = 0
    """Rank number of the first one."""
    num_ranks: int = 1
    """Ranks whose ports count up from the first one's."""
    topic: str = ""
    """Prefix of the topics to read."""
    bind: bool | None = None
    """Whether we bind the address. None: only if its host is a wildcard."""
    capacity: dict[str, int] = {}
    """Tier (gpu, cpu, disk, external) -> pages that one rank has room for. Tiers that are not named are unknown."""
    metrics_url: str | None = None
    """The engine's own metrics, `http://HOST:PORT/metrics`, which say its load and how many pages fit on its device."""
    url: str | None = None
    """Where the engine takes requests: `http://HOST:PORT`."""
    republish: str | None = None
    """Address on which its events are sent on, to routers with an index of their own: `tcp://*:PORT`. None: nowhere."""
    republish_replay: str | None = None
    """Address of a replay socket for these. None: a router that misses batches cannot fetch them."""

    def __post_init__(self) -> None:
        self._check_names()
        self._check_numbers()
        for field in _ADDRESSES:
            address: str | None = getattr(self, field)
            if address is not None:
                _check_address(field, address)
                endpoint_of_rank(address, self.num_ranks - 1, field)
        if self.replay_endpoint is not None and has_wildcard(self.replay_endpoint):
            raise InvalidValueError("replay_endpoint", self.replay_endpoint, "the engine's address, without a wildcard")

    @property
    def binds(self) -> bool:
        return has_wildcard(self.endpoint) if self.bind is None else self.bind

    @property
    def num_files(self) -> int:
        """File descriptors that reading all ranks needs at most. Replays have sockets of their own, and so has what is
        sent on, with room for some readers.
        """
        sockets = 1 + (self.replay_endpoint is not None) + 3 * (self.republish is not None)
        return self.num_ranks * SOCKET_FILES * sockets

    def of_rank(self, offset: int) -> EngineSettings:
        addresses = {field: getattr(self, field) for field in _ADDRESSES}
        ours = {field: endpoint_of_rank(each, offset, field) for field, each in addresses.items() if each is not None}
        return msgspec.structs.replace(self, **ours, dp_rank=self.dp_rank + offset, num_ranks=1)

    def _check_names(self) -> None:
        for field in self.__struct_fields__:
            if isinstance(text := getattr(self, field), str) and field != "cache_salt":
                check_utf8(field, text)
        for field in ("worker", "model", "tenant"):
            name: str | None = getattr(self, field)
            if name is not None and not is_name(name):
                raise InvalidValueError(field, name, f"1 to {MAX_NAME_BYTES} bytes")
        for field in ("lora_name", "cache_salt"):
            name = getattr(self, field)
            if name and not is_name(name):
                shown = name if field == "lora_name" else f"{len(name)} characters"
                raise InvalidValueError(field, shown, f"at most {MAX_NAME_BYTES} bytes of UTF-8")
        if self.worker is not None and self.model is None:
            raise InvalidValueError("model", None, "the model that the engine serves")
        if self.worker is None and self.republish is not None:
            raise InvalidValueError("worker", None, "a name, because its events are republished")
        if self.republish is None and self.republish_replay is not None:
            raise InvalidValueError("republish", None, "an address, because republish_replay is one")
        if self.worker is None and (self.num_ranks != 1 or self.replay_endpoint is not None):
            raise InvalidValueError("worker", None, "a name, because there are several ranks or a replay socket")

    def _check_numbers(self) -> None:
        if not 1 <= self.num_ranks <= MAX_RANKS:
            raise InvalidValueError("num_ranks", self.num_ranks, f"1 .. {MAX_RANKS}")
        if not 0 <= self.dp_rank <= MAX_DP_RANK - self.num_ranks + 1:
            raise InvalidValueError("dp_rank", self.dp_rank, f"0 .. {MAX_DP_RANK - self.num_ranks + 1}")
        if self.block_size is not None and not 1 <= self.block_size <= MAX_BLOCK_SIZE:
            raise InvalidValueError("block_size", self.block_size, f"1 .. {MAX_BLOCK_SIZE}")
        for tier, pages in self.capacity.items():
            if tier not in TIERS or pages < 1:
                raise InvalidValueError("capacity", f"{tier}: {pages}", f"pages of {', '.join(TIERS)}, 1 or more")
        if self.metrics_url is not None and not _METRICS_URL.fullmatch(self.metrics_url):
            raise InvalidValueError("metrics_url", self.metrics_url, "http://HOST:PORT/metrics")
        if self.url is not None and not re.search(URL_PATTERN, self.url):
            raise InvalidValueError("url", self.url, "http://HOST:PORT")
        if self.attention_chunk_size is not None and not 1 <= self.attention_chunk_size <= MAX_GROUP_SIZE:
            raise InvalidValueError("attention_chunk_size", self.attention_chunk_size, f"1 .. {MAX_GROUP_SIZE}")


def is_name(text: str) -> bool:
    """Whether a text is valid as the name of a worker, a model and so on."""
    try:
        return 1 <= len(text.encode()) <= MAX_NAME_BYTES
    except UnicodeEncodeError:
        return False


class _EngineList(msgspec.Struct, forbid_unknown_fields=True):
    engines: list[EngineSettings]


def read_engines(path: Path) -> list[EngineSettings]:
    """Read a list of engines: TOML with `[[engines]]` tables, or `{"engines": [...]}` in a file named `.json`. Raises
    InvalidValueError naming the file and the field; OSError.
    """
    data = path.read_bytes()
    if len(data) > _MAX_CONFIG_BYTES:
        raise InvalidValueError(str(path), f"{len(data)} bytes", f"at most {_MAX_CONFIG_BYTES}")
    decode = msgspec.json.decode if path.suffix == ".json" else msgspec.toml.decode
    try:
        given = decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidValueError(str(path), str(error), "TOML, or JSON in a file named .json") from None
    try:
        return msgspec.convert(given, _EngineList).engines
    except msgspec.ValidationError as error:
        raise _fault(str(path), error, given) from None


def parse_engine(text: str, model: str | None = None) -> EngineSettings:
    """Parse an engine from a flag: `NAME=tcp://HOST:PORT,field=value,...`, or fields alone. Raises InvalidValueError.

    `ranks` and `replay` are short for num_ranks and replay_endpoint. A replay endpoint may be a port of the same host,
    and a capacity is one of the device unless it names a tier: `capacity.cpu=4096`. model: that of an engine which
    names none.
    """
    fields: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        name = _SHORT.get(name, name)
        is_address = "://" in value or _HOST_PORT.fullmatch(value)
        if not fields and is_address and name not in EngineSettings.__struct_fields__:
            fields["worker"], name = name, "endpoint"
        if not equals and not fields:
            raise InvalidValueError("engine", without_user(part), "NAME=tcp://HOST:PORT,field=value,...")
        if not equals or name in fields:
            shown = name if equals else f"{count(len(part), 'character')} without ="  # the text may be part of a salt
            expected = "NAME=tcp://HOST:PORT,field=value,... with every field once"
            raise InvalidValueError("engine", ", ".join([*fields, shown]), expected)
        known = (*EngineSettings.__struct_fields__, *_SHORT)
        if (field := name.partition(".")[0]) not in known:
            expected = "a field of an engine" if fields else "NAME=tcp://HOST:PORT, or a field of an engine"
            raise InvalidValueError("engine", field, f"{expected}; the nearest name is {nearest(field, known)}")
        if field == "capacity":
            fields.setdefault("capacity", {})[name.partition(".")[2] or "gpu"] = value
        else:
            fields[name] = value
    if (port := fields.get("replay_endpoint", "")).isdecimal() and "endpoint" in fields:
        fields["replay_endpoint"] = f"{fields['endpoint'].rpartition(':')[0]}:{port}"
    if "worker" in fields and fields.setdefault("model", model) is None:
        raise InvalidValueError("engine", fields["worker"], "also model=MODEL, or --model MODEL for all engines")
    try:
        return msgspec.convert(fields, EngineSettings, strict=False)
    except UnicodeEncodeError:  # of a field that is no text
        raise InvalidValueError("engine", ", ".join(fields), "text that UTF-8 can hold") from None
    except msgspec.ValidationError as error:
        raise _fault("engine", error, fields) from None


def engines_of(config: Path | None, flags: Sequence[str], model: str | None) -> list[EngineSettings]:
    """Return the engines of a file and of flags. model: of flags that name none. Raises as both readers do."""
    return [*(read_engines(config) if config else []), *(parse_engine(text, model) for text in flags)]


def _fault(where: str, error: msgspec.ValidationError, given: Any) -> InvalidValueError:
    """What msgspec found, with the field. where: the file or the flag. given: its engines. Shows no salt."""
    said, place = _FAULT.fullmatch(str(error)).groups(default="")  # type: ignore[union-attr]  # matches any text
    field, within = (f"{where}: {place}", f"{where}: {place}.") if place else (where, f"{where}: ")
    if isinstance(error.__cause__, InvalidValueError):
        cause = error.__cause__
        return InvalidValueError(f"{within}{cause.field}", cause.value, cause.expected)
    quoted = re.findall("`([^`]*)`", said)
    if not quoted:  # a number that is too large
        return InvalidValueError(field, said, "a value in its range")
    first, last = quoted[0], quoted[-1]
    if "unknown field" in said:
        known = EngineSettings.__struct_fields__ if place else ("engines",)
        return InvalidValueError(field, first, f"a known field; the nearest name is {nearest(first, known)}")
    if "missing" in said:
        return InvalidValueError(f"{within}{first}", None, "a value")
    kind = first.partition(" ")[0]
    if kind in ("int", "bool"):  # a text may have a salt
        for index, name in _STEP.findall(place):
            given = given[int(index)] if index else given[name]
        last = given
    return InvalidValueError(field, last, _TYPES.get(kind, kind))


def _check_address(field: str, address: str) -> None:
    scheme, separator, rest = address.partition("://")
    if scheme not in _SCHEMES or not separator or not rest or "\0" in address:
        raise InvalidValueError(field, address, "tcp://HOST:PORT, ipc://PATH or inproc://NAME")
    if scheme == "tcp":
        try:
            port = urlsplit(address.replace("//*:", "//0.0.0.0:")).port
        except ValueError:
            port = None
        if not port:
            raise InvalidValueError(field, address, "tcp://HOST:PORT with a port in 1 .. 65535")
