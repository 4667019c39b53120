"""The faults. Importing this package fills the table `fault.FAULTS`."""

from tests.chaos.faults import (
    bridges,
    clocks,
    disks,
    engines,
    groups,
    load,
    names,
    network,
    records,
    servers,
    services,
    topics,
)

__all__ = [
    "bridges",
    "clocks",
    "disks",
    "engines",
    "groups",
    "load",
    "names",
    "network",
    "records",
    "servers",
    "services",
    "topics",
]
