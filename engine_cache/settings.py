"""What the environment says about the engine side."""

from __future__ import annotations

import os
import re

from pydantic import Field, field_validator

from kv_events.errors import InvalidValueError
from kv_events.settings import KvsightSettings, variable

DEBUG_POOLS = "KVSIGHT_DEBUG_POOLS"
HOST_MEMORY_RESERVE = "KVSIGHT_HOST_MEMORY_RESERVE_BYTES"
HICACHE_HOST_MEMORY_RESERVE_BYTES = 10 * 1024**3

_HOST_AND_PORT = re.compile(r"(?:\[[0-9a-fA-F:.]+\]|[^\s:/]+):[0-9]{1,5}")


def debug_pools() -> bool:
    """Whether allocators look for double frees and foreign indices: `KVSIGHT_DEBUG_POOLS`, 0 (default) or 1."""
    value = os.environ.get(DEBUG_POOLS, "0")
    if value not in ("0", "1"):
        raise InvalidValueError(DEBUG_POOLS, value, "0 or 1")
    return value == "1"


def host_memory_reserve_bytes() -> int:
    """Memory that host pools leave to everybody else: `KVSIGHT_HOST_MEMORY_RESERVE_BYTES`, 10 GiB by default."""
    value = os.environ.get(HOST_MEMORY_RESERVE, str(HICACHE_HOST_MEMORY_RESERVE_BYTES))
    if not value.isdecimal():
        raise InvalidValueError(HOST_MEMORY_RESERVE, value, "a number of bytes")
    return int(value)


class MooncakeSettings(KvsightSettings):
    """How to reach a Mooncake store, and what to lend it. Frozen; a bad value names the variable."""

    mooncake_master: str = "127.0.0.1:50051"
    """`host:port` of the master."""
    mooncake_metadata_server: str = "P2PHANDSHAKE"
    """Where the data planes find each other: a URL, or P2PHANDSHAKE to ask each other."""
    mooncake_local_hostname: str = "127.0.0.1"
    """Address of this machine, under which the others reach what lies here."""
    mooncake_protocol: str = Field("tcp", pattern="^(tcp|rdma)$")
    mooncake_devices: str = ""
    """RDMA devices, by commas. Empty: found by Mooncake itself."""
    mooncake_segment_bytes: int = Field(2**30, ge=0)
    """Memory of this machine that the store may fill, over all ranks of a tensor-parallel group. 0: none."""
    mooncake_buffer_bytes: int = Field(2**24, ge=2**20)
    """Memory of the client itself. Pages do not go through it."""
    mooncake_connect_timeout_s: float = Field(3.0, gt=0)
    mooncake_call_timeout_s: float = Field(5.0, ge=0.001)
    """How long the master may take for an answer. The first client of a process sets it for all."""
    mooncake_watch_interval_s: float = Field(1.0, gt=0)
    """Time between two looks whether the master is there and still knows what it was told."""
    mooncake_max_tracked_pages: int = Field(2**20, ge=1)
    """Bound on the pages that are told to be in the store; the one that was used longest ago is told no more."""
    mooncake_owns_store: bool = False
    """Whether nobody else uses the store, so that clearing may remove everything in it."""

    @field_validator("mooncake_master")
    @classmethod
    def _is_address(cls, value: str) -> str:
        if not _HOST_AND_PORT.fullmatch(value) or not 0 < int(value.rpartition(":")[2]) < 2**16:
            raise InvalidValueError(variable("mooncake_master"), value, "host:port")
        return value
