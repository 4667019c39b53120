"""Settings of caches, pools and storage, from `KVSIGHT_*` variables. Those of Mooncake have Mooncake's own names."""

import os
import re
from typing import Literal

from pydantic import Field, field_validator

from kv_events.errors import InvalidValueError
from kv_events.runtime.settings import KvsightSettings
from kv_events.runtime.variables import variable

HOST_MEMORY_RESERVE = "KVSIGHT_HOST_MEMORY_RESERVE_BYTES"
CHECK_FREES = False
"""Whether allocators check for double frees and foreign indices. Tests set it."""
HICACHE_HOST_MEMORY_RESERVE_BYTES = 10 * 1024**3

_HOST_AND_PORT = re.compile(r"(?:\[[0-9a-fA-F:.]+\]|[^\s:/]+):[0-9]{1,5}")


def host_memory_reserve_bytes() -> int:
    """Memory that host pools leave to other processes: `KVSIGHT_HOST_MEMORY_RESERVE_BYTES`, 10 GiB by default."""
    value = os.environ.get(HOST_MEMORY_RESERVE, str(HICACHE_HOST_MEMORY_RESERVE_BYTES))
    if not value.isdecimal():
        raise InvalidValueError(HOST_MEMORY_RESERVE, value, "a number of bytes")
    return int(value)


class MooncakeSettings(KvsightSettings):
    """How to reach a Mooncake store, and the memory it may use. Frozen. A bad value names the variable."""

    mooncake_master: str = "127.0.0.1:50051"
    """`host:port` of the master."""
    mooncake_metadata_server: str = "P2PHANDSHAKE"
    """Where clients find each other: a URL, or P2PHANDSHAKE to exchange addresses directly."""
    mooncake_local_hostname: str = "127.0.0.1"
    """Address under which other machines reach this one."""
    mooncake_protocol: Literal["tcp", "rdma"] = "tcp"
    """Transport of pages."""
    mooncake_devices: str = ""
    """RDMA devices, separated by commas. Empty: Mooncake finds them."""
    mooncake_segment_bytes: int = Field(2**30, ge=0)
    """Memory of this machine that the store may use, over all ranks of a tensor-parallel group. 0: none."""

    mooncake_buffer_bytes: int = Field(2**24, ge=2**20)
    """Memory of the client itself. Pages do not pass through it."""
    mooncake_connect_timeout_s: float = Field(3.0, gt=0)
    """Time limit for the first connection."""
    mooncake_call_timeout_s: float = Field(5.0, ge=0.001)
    """Time limit for an answer of the master. The first client of a process sets it for all."""
    mooncake_watch_interval_s: float = Field(1.0, gt=0)
    """Time between checks that the master is reachable and has kept its state."""
    mooncake_max_tracked_pages: int = Field(2**20, ge=1)
    """Maximum number of pages reported as stored. Above it, the least recently used page is reported as removed."""
    mooncake_owns_store: bool = Field(False)
    """Whether the store has no other users, so that clearing may remove everything in it."""

    @field_validator("mooncake_segment_bytes", mode="before")
    @classmethod
    def _units_are_bytes(cls, value: object) -> object:
        """Mooncake also accepts 4gb, which is 4 GiB."""
        found = re.fullmatch(r"([0-9]{1,9})([kmg])b", value.strip().lower()) if isinstance(value, str) else None
        return value if found is None else int(found[1]) * 2 ** (10 * ("kmg".index(found[2]) + 1))

    @field_validator("mooncake_master")
    @classmethod
    def _is_address(cls, value: str) -> str:
        if not _HOST_AND_PORT.fullmatch(value) or not 0 < int(value.rpartition(":")[2]) < 2**16:
            raise InvalidValueError(variable("mooncake_master"), value, "host:port")
        return value
