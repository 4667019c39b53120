"""The faults. Importing this package fills the table `fault.FAULTS`."""

from tests.chaos.faults import engines, load, records, servers, services, topics

__all__ = ["engines", "load", "records", "servers", "services", "topics"]
